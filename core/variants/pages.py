"""Selected pages: a query reads those of its pages that some score chose, at their own positions."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.core.checks import check_tensor
from attnloom.core.layout import BlockSparseLayout


def select_pages(layout: BlockSparseLayout, pages: Tensor, counts: Tensor | None = None) -> BlockSparseLayout:
    """The chosen pages of each row, as Quest (arXiv 2406.10774) and the selected branch of NSA (2502.11089) read them.

    Any variant runs on it: causality, windows, ALiBi and RoPE go by the positions that pages have in the whole row.
    Where KV heads choose for themselves, a row of the layout is a request's KV head, in an engine with one KV head.

    Args:
        layout: whole sequences, or a selection with positions.
        pages: int32 or int64 ``[num_rows, k]``, numbers of pages within the row, ascending. The last one of a row is
            the row's last page: the queries stand at its end.
        counts: int32 or int64 ``[num_rows]``, how many of ``pages`` count; None: all. A row without keys has 0.

    Returns:
        a layout of the chosen pages; its indices are gathered, its pages are where they were.

    Raises:
        ValueError: a number outside the row, or a row whose last page is not chosen last (checked on a CPU).
    """
    check_tensor("pages", pages, ndim=2, device=layout.device)
    if pages.shape[0] != layout.num_rows:
        raise ValueError(f"pages.shape={tuple(pages.shape)}: expected one row per row of layout, {layout.num_rows}")
    size, width = layout.block_size, pages.shape[1]
    counted = torch.full_like(layout.starts, width) if counts is None else counts.to(torch.int64)
    if counted.shape != layout.starts.shape:
        raise ValueError(f"counts.shape={tuple(counted.shape)}: expected one per row of layout, {layout.num_rows}")
    blocks = -(-layout.lengths.to(torch.int64) // size)
    used = torch.arange(width, device=layout.device) < counted[:, None]
    chosen = torch.where(used, pages.to(torch.int64), 0)
    if not layout.indices.is_cuda:
        _check(chosen, counted, blocks, used)
    at = layout.entries(chosen)
    positions = (chosen * size).to(torch.int32) if layout.positions is None else _take(layout.positions, at)
    tail = layout.lengths.to(torch.int64) - (blocks - 1) * size
    lengths = torch.where(counted > 0, (counted - 1) * size + tail, 0)
    return BlockSparseLayout(
        size,
        torch.arange(layout.num_rows, device=layout.device) * width,
        lengths.to(torch.int32),
        _take(layout.indices, at).flatten(),
        positions.flatten().contiguous(),
    )


def _take(table: Tensor, at: Tensor) -> Tensor:
    return table[at.clamp(max=max(table.shape[0] - 1, 0))] if table.shape[0] else at.to(table.dtype)


def _check(chosen: Tensor, counts: Tensor, blocks: Tensor, used: Tensor) -> None:
    outside = used & ((chosen < 0) | (chosen >= blocks[:, None]))
    if bool(outside.any()):
        row, nth = (int(i) for i in outside.nonzero()[0])
        raise ValueError(
            f"pages[{row}][{nth}]={int(chosen[row, nth])}: expected 0 to {int(blocks[row]) - 1}, its pages"
        )
    for row, (count, pages) in enumerate(zip(counts.tolist(), blocks.tolist(), strict=True)):
        if not 0 <= count <= chosen.shape[1]:
            raise ValueError(f"counts[{row}]={count}: expected 0 to {chosen.shape[1]}, the columns of pages")
        if count == 0 and pages == 0:
            continue
        if count == 0 or int(chosen[row, count - 1]) != pages - 1:
            raise ValueError(f"pages[{row}]: expected the row's last page, {pages - 1}, as the last of {count} chosen")
