"""Packed boolean masks: one bit per (query, key), for draft trees and masks that no formula gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnloom.core.checks import check_tensor


def pack_masks(
    masks: Sequence[Tensor], kv_begin: Sequence[int] | None = None, *, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Pack one mask per request into the parameters of :func:`attnloom.variants.PackedMask`.

    Args:
        masks: per request a bool tensor ``[qo_len, columns]``; True: the query sees the key.
        kv_begin: per request the slot (counted in the request) of column 0, default 0. Keys before it are visible:
            the prefix of a draft tree takes no bits.
        device: where the result lies.

    Returns:
        ``packed_mask`` uint8, ``mask_offset`` int64 ``[R]`` (first bit of a request), ``mask_begin`` and
        ``mask_columns`` int32 ``[R]``.
    """
    begins = [0] * len(masks) if kv_begin is None else list(kv_begin)
    if len(begins) != len(masks):
        raise ValueError(f"kv_begin: expected one per mask, {len(masks)}, got {len(begins)}")
    bits = [check_tensor(f"masks[{i}]", mask, dtype=torch.bool, ndim=2).cpu().flatten() for i, mask in enumerate(masks)]
    flat = torch.cat([torch.empty(0, dtype=torch.bool), *bits])
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[0] % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
    sizes = torch.tensor([part.shape[0] for part in bits], dtype=torch.int64)
    return {
        "packed_mask": (flat * weights).sum(1).to(torch.uint8).to(device),
        "mask_offset": (torch.cumsum(sizes, 0) - sizes).to(device),
        "mask_begin": torch.tensor(begins, dtype=torch.int32).to(device),
        "mask_columns": torch.tensor([mask.shape[1] for mask in masks], dtype=torch.int32).to(device),
    }
