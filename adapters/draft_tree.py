"""Draft trees to a packed mask: what verification of speculative decoding has.

A request's drafts are the last keys of its row, and its queries. The prefix before them is seen by every draft, so it
takes no bits and no work: it is blocks of the layout like any other. Which drafts see each other is one bit a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.core.checks import check_tensor


def draft_columns(mask: Tensor, prefix_lens: Tensor, drafts: int) -> Tensor:
    """What drafts see of each other, out of a mask that has the prefix as well. Nothing is read back from a GPU.

    Args:
        mask: flat, request after request, row after row: for each draft which of ``prefix + drafts`` keys it sees.
        prefix_lens: integer ``[requests]``, KV tokens before the drafts.
        drafts: drafts of each request, the same for all.

    Returns:
        as the mask, ``[requests * drafts * drafts]``.
    """
    columns = prefix_lens.to(torch.int64) + drafts
    begins = torch.cumsum(columns * drafts, 0) - columns * drafts
    draft = torch.arange(drafts, device=mask.device)
    entries = (begins + columns - drafts).view(-1, 1, 1) + draft
    entries = entries + draft.view(1, -1, 1) * columns.view(-1, 1, 1)
    # Where a graph is captured lengths are made up, and no mask need go with them.
    return mask[entries.view(-1).clamp(max=mask.shape[0] - 1)]


def tail_masks(mask: Tensor, prefix_lens: Tensor, drafts: int, *, with_prefix: bool) -> dict[str, Tensor]:
    """The parameters of :func:`attnloom.variants.PackedMask` from SGLang's tree mask.

    Args:
        mask: bool, flat, request after request, row after row: for each draft which keys it sees. It may be longer.
        prefix_lens: integer ``[requests]``, KV tokens before the drafts.
        drafts: drafts of each request, the same for all.
        with_prefix: a row has ``prefix + drafts`` columns (FULL_MASK), of which only the last are read; otherwise
            ``drafts`` (QLEN_ONLY).

    Raises:
        ValueError: the mask has fewer elements than drafts among each other.
    """
    check_tensor("mask", mask, dtype=torch.bool, ndim=1)
    requests = prefix_lens.shape[0]
    pairs = drafts * drafts
    if mask.shape[0] < requests * pairs:
        raise ValueError(f"mask.shape={tuple(mask.shape)}: expected at least {requests} x {drafts} x {drafts} elements")
    bits = draft_columns(mask, prefix_lens, drafts) if with_prefix else mask[: requests * pairs]
    return _packed(bits, prefix_lens, drafts, drafts)


def branch_masks(prefix_lens: Tensor, branches: int, stride: int, step: int) -> dict[str, Tensor]:
    """The same parameters for one step of drafting: every branch of a request is a query, and sees its own drafts.

    Branch b has its drafts at the keys ``prefix + b * stride ... prefix + b * stride + step``.

    Args:
        prefix_lens: integer ``[requests]``, KV tokens before the drafts.
        branches: queries of each request.
        stride: keys from one branch to the next.
        step: drafts of a branch before the newest one.
    """
    requests, device = prefix_lens.shape[0], prefix_lens.device
    column = torch.arange(stride * (branches - 1) + step + 1, device=device)
    begin = torch.arange(0, branches * stride, stride, device=device).view(-1, 1)
    seen = (column >= begin) & (column <= begin + step)
    return _packed(seen.flatten().repeat(requests), prefix_lens, branches, column.shape[0])


def _packed(bits: Tensor, prefix_lens: Tensor, queries: int, columns: int) -> dict[str, Tensor]:
    """Parameters of PackedMask from bits ``[requests * queries * columns]`` of the keys after the prefix."""
    requests, device = prefix_lens.shape[0], bits.device
    octets = torch.nn.functional.pad(bits, (0, -bits.shape[0] % 8)).view(-1, 8).to(torch.uint8)
    return {
        "packed_mask": (octets << torch.arange(8, dtype=torch.uint8, device=device)).sum(1, dtype=torch.uint8),
        "mask_offset": torch.arange(requests, device=device) * (queries * columns),
        "mask_begin": prefix_lens.to(torch.int32),
        "mask_columns": torch.full((requests,), columns, dtype=torch.int32, device=device),
    }
