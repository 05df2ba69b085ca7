"""What speculative decoding calls of SGLang's kernels for CPUs, in torch: bookkeeping of slots and accepted drafts.

The two kernels over trees are SGLang's own, written in Triton, with the same arguments.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor


def build_tree_kernel_efficient_cpu(*args: Any) -> None:
    """The draft tree's mask, positions and links."""
    from sglang.srt.speculative.eagle_utils import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*args)


def verify_tree_greedy_cpu(**kwargs: Any) -> None:
    """Which drafts the target accepts; three arguments are spelled otherwise in Triton."""
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_triton

    verify_tree_greedy_triton(**{name.replace("retrive_", "retrieve_"): value for name, value in kwargs.items()})


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, pitch: int
) -> None:
    """New slots into each request's row of the token table."""
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = locations[begin : begin + end - start].to(table.dtype)
        begin += end - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, out: Tensor, pitch: int
) -> None:
    """The slots of some columns of each request, end to end."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([table[row, start:end] for row, start, end in spans])
    out[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, seq_lens: Tensor, out: Tensor, pitch: int, topk: int, steps: int
) -> None:
    """The slots behind each request, for the drafts of all branches and steps."""
    assign_extend_cache_locs_cpu(rows, table, seq_lens, seq_lens + topk * steps, out, pitch)


def fill_bonus_tokens_cpu(tokens: Tensor, lens: Tensor, bonus: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    last = torch.arange(len(lens)) * stride + lens - 1
    bonus[: len(lens)] = tokens.flatten()[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(index: Tensor, locations: Tensor, out: Tensor) -> None:
    """The slots of accepted drafts, end to end; -1 is none."""
    kept = index.flatten()
    found = locations[kept[kept >= 0].long()]
    out[: len(found)] = found


def copy_all_layer_kv_cache_cpu(addresses: Tensor, row_bytes: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Rows of every layer's cache to other slots, all read before any is written."""
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + target * size, row, size)
