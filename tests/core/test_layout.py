"""Layouts: each constructor gives the rows that its source describes, without copying it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnloom.core.layout import BlockSparseLayout


def rows_of(layout: BlockSparseLayout) -> list[list[int]]:
    """Block ids of each row, looked up as DESIGN.md defines them."""
    rows = []
    for start, length in zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True):
        blocks = -(-length // layout.block_size)
        rows.append([int(layout.indices[start + i * layout.index_stride]) for i in range(blocks)])
    return rows


def _shares_memory(view: torch.Tensor, owner: torch.Tensor) -> bool:
    return view.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()


@st.composite
def tables(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(block table with a pitch of its own, lengths, block size)."""
    block_size = draw(st.sampled_from((1, 3, 16, 64)))
    kv_lens = draw(st.lists(st.integers(0, 300), min_size=0, max_size=6))
    widest = max((-(-n // block_size) for n in kv_lens), default=0)
    pitch = widest + draw(st.integers(1, 9))
    rng = random.Random(draw(st.integers(0, 2**31 - 1)))
    wide = torch.tensor([[rng.randrange(10_000) for _ in range(pitch)] for _ in kv_lens], dtype=torch.int32)
    wide = wide.reshape(len(kv_lens), pitch)
    return wide[:, : max(1, widest)], torch.tensor(kv_lens, dtype=torch.int32), block_size


@given(tables())
def test_page_table(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    table, lengths, block_size = case
    layout = BlockSparseLayout.from_page_table(table, lengths, block_size)
    assert layout.block_size == block_size
    expected = [row[: -(-n // block_size)].tolist() for row, n in zip(table, lengths.tolist(), strict=True)]
    assert rows_of(layout) == expected


def test_page_table_is_used_where_it_lies() -> None:
    pool = torch.arange(400, dtype=torch.int32).reshape(10, 40)
    lengths = torch.tensor([30, 64], dtype=torch.int32)
    layout = BlockSparseLayout.from_page_table(pool[2:4, 5:25], lengths, 16)
    assert _shares_memory(layout.indices, pool) and _shares_memory(layout.lengths, lengths)
    assert rows_of(layout) == [[85, 86], [125, 126, 127, 128]]
    pool[2, 5], lengths[1] = 399, 1
    assert rows_of(layout) == [[399, 86], [125]]


def test_every_second_row_of_a_table() -> None:
    pool = torch.arange(60, dtype=torch.int32).reshape(6, 10)
    layout = BlockSparseLayout.from_page_table(pool[1::2], torch.tensor([9, 4, 1], dtype=torch.int32), 4)
    assert rows_of(layout) == [[10, 11, 12], [30], [50]]


def test_csr() -> None:
    indptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    indices = torch.tensor([7, 1, 4, 4, 9], dtype=torch.int32)
    layout = BlockSparseLayout.from_csr(indptr, indices, torch.tensor([20, 0, 33], dtype=torch.int32), 16)
    assert rows_of(layout) == [[7, 1], [], [4, 4, 9]]
    assert _shares_memory(layout.indices, indices)


def test_token_table() -> None:
    pool = torch.arange(100, dtype=torch.int32).reshape(5, 20)
    req_rows = torch.tensor([3, 0], dtype=torch.int64)
    layout = BlockSparseLayout.from_token_table(pool, req_rows, torch.tensor([3, 2], dtype=torch.int32))
    assert layout.block_size == 1
    assert rows_of(layout) == [[60, 61, 62], [0, 1]]
    assert _shares_memory(layout.indices, pool)


def test_pages_of_a_token_table() -> None:
    pool = torch.arange(100, dtype=torch.int32).reshape(5, 20)
    req_rows, lengths = torch.tensor([3, 0, 1]), torch.tensor([9, 4, 0], dtype=torch.int32)
    layout = BlockSparseLayout.from_token_table(pool, req_rows, lengths, 4)
    assert (layout.block_size, layout.index_stride) == (4, 4)
    assert rows_of(layout) == [[60, 64, 68], [0], []]
    assert _shares_memory(layout.indices, pool)
    numbers = torch.tensor([[2, 0], [0, 0], [1, 1]])
    assert layout.entries(numbers).tolist() == [[68, 60], [0, 0], [24, 24]]


def test_another_device_takes_everything_along() -> None:
    pool = torch.arange(40, dtype=torch.int32)
    layout = BlockSparseLayout(8, torch.tensor([3]), torch.tensor([20], dtype=torch.int32), pool, pool + 1, 5)
    there = layout.to("meta")
    assert (there.device.type, there.block_size, there.index_stride) == ("meta", 8, 5)
    again = layout.to("cpu")
    assert rows_of(again) == rows_of(layout) == [[3, 8, 13]]
    assert again.positions is not None and again.positions.tolist() == list(range(1, 41))


@given(
    rows=st.integers(1, 5),
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from((1, 4, 16)),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
)
def test_mask(rows: int, num_blocks: int, block_size: int, density: float, seed: int) -> None:
    """A boolean block mask: the chosen blocks in order, at the positions at which they stand."""
    mask = torch.rand(rows, num_blocks, generator=torch.Generator().manual_seed(seed)) < density
    layout = BlockSparseLayout.from_mask(mask, block_size)
    expected = [[j for j in range(num_blocks) if mask[r, j]] for r in range(rows)]
    assert rows_of(layout) == expected
    assert layout.lengths.tolist() == [len(row) * block_size for row in expected]
    assert layout.positions is not None
    for start, row in zip(layout.starts.tolist(), expected, strict=True):
        assert layout.positions[start : start + len(row)].tolist() == [j * block_size for j in row]


def test_a_layout_is_frozen() -> None:
    layout = BlockSparseLayout.from_page_table(
        torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1], dtype=torch.int32), 1
    )
    with pytest.raises(AttributeError):
        layout.block_size = 2  # type: ignore[misc]
