"""Layouts that are refused when they are made: the error names the argument and its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnloom.core.layout import BlockSparseLayout

INT32, INT64 = torch.int32, torch.int64
Make = Callable[[], BlockSparseLayout]


def _direct(**change: Any) -> BlockSparseLayout:
    good: dict[str, Any] = {
        "block_size": 16,
        "starts": torch.tensor([0, 2]),
        "lengths": torch.tensor([20, 5], dtype=INT32),
        "indices": torch.tensor([1, 2, 3], dtype=INT32),
    }
    return BlockSparseLayout(**{**good, **change})


def _csr(indptr: list[int], lengths: list[int]) -> BlockSparseLayout:
    return BlockSparseLayout.from_csr(
        torch.tensor(indptr, dtype=INT32), torch.tensor([1, 2, 3], dtype=INT32), torch.tensor(lengths, dtype=INT32), 16
    )


def _table(table: torch.Tensor, lengths: list[int], block_size: int = 16) -> BlockSparseLayout:
    return BlockSparseLayout.from_page_table(table, torch.tensor(lengths, dtype=INT32), block_size)


def _tokens(rows: torch.Tensor, page_size: Any = 1) -> BlockSparseLayout:
    return BlockSparseLayout.from_token_table(
        torch.zeros(3, 8, dtype=INT32), rows, torch.tensor([4], dtype=INT32), page_size
    )


CASES: list[tuple[str, Make, type[Exception], str]] = [
    ("block size 0", lambda: _direct(block_size=0), ValueError, r"block_size=0: expected at least 1"),
    ("index stride 0", lambda: _direct(index_stride=0), ValueError, r"index_stride=0: expected at least 1"),
    ("index stride negative", lambda: _direct(index_stride=-16), ValueError, r"index_stride=-16: expected at least 1"),
    ("index stride float", lambda: _direct(index_stride=2.0), TypeError, r"index_stride=2\.0: expected an int"),
    ("index stride bool", lambda: _direct(index_stride=True), TypeError, r"index_stride=True: expected an int"),
    (
        "index stride of 32 bits",
        lambda: _direct(index_stride=2**31),
        ValueError,
        r"index_stride=2147483648: expected at most 2147483647",
    ),
    ("block size float", lambda: _direct(block_size=16.0), TypeError, r"block_size=16\.0"),
    (
        "starts int32",
        lambda: _direct(starts=torch.tensor([0, 2], dtype=INT32)),
        TypeError,
        r"starts\.dtype=torch\.int32",
    ),
    ("lengths int64", lambda: _direct(lengths=torch.tensor([20, 5])), TypeError, r"lengths\.dtype=torch\.int64"),
    ("indices int64", lambda: _direct(indices=torch.tensor([1, 2, 3])), TypeError, r"indices\.dtype=torch\.int64"),
    ("indices 2d", lambda: _direct(indices=torch.zeros(1, 3, dtype=INT32)), ValueError, r"indices\.shape=\(1, 3\)"),
    ("indices list", lambda: _direct(indices=[1, 2, 3]), TypeError, r"indices: expected a tensor, got list"),
    ("rows differ", lambda: _direct(lengths=torch.tensor([20], dtype=INT32)), ValueError, r"lengths\.shape=\(1,\)"),
    (
        "devices differ",
        lambda: _direct(lengths=torch.zeros(2, dtype=INT32, device="meta")),
        ValueError,
        r"lengths\.device",
    ),
    ("strided", lambda: _direct(starts=torch.zeros(4, dtype=INT64)[::2]), ValueError, r"starts\.stride\(\)=\(2,\)"),
    ("positions", lambda: _direct(positions=torch.zeros(2, dtype=INT32)), ValueError, r"positions\.shape=\(2,\): .*3"),
    ("positions dtype", lambda: _direct(positions=torch.zeros(3)), TypeError, r"positions\.dtype=torch\.float32"),
    ("csr shrinks", lambda: _csr([0, 2, 1], [20, 0]), ValueError, r"indptr=\[0, 2, 1\]"),
    ("csr too far", lambda: _csr([0, 2, 4], [20, 5]), ValueError, r"indptr=\[0, 2, 4\]: .*3"),
    ("csr too long", lambda: _csr([0, 2, 3], [20, 17]), ValueError, r"lengths\[1\]=17: expected 0 to 16"),
    ("csr negative", lambda: _csr([0, 2, 3], [-1, 5]), ValueError, r"lengths\[0\]=-1"),
    ("csr rows", lambda: _csr([0, 2, 3], [5]), ValueError, r"lengths\.shape=\(1,\)"),
    ("table 1d", lambda: _table(torch.zeros(4, dtype=INT32), [1]), ValueError, r"block_table\.shape=\(4,\)"),
    ("table int64", lambda: _table(torch.zeros(1, 4, dtype=INT64), [1]), TypeError, r"block_table\.dtype=torch\.int64"),
    (
        "table columns",
        lambda: _table(torch.zeros(4, 8, dtype=INT32)[:, ::2], [1] * 4),
        ValueError,
        r"block_table\.stride",
    ),
    ("table rows", lambda: _table(torch.zeros(2, 8, dtype=INT32), [1]), ValueError, r"lengths\.shape=\(1,\)"),
    ("table block size", lambda: _table(torch.zeros(1, 8, dtype=INT32), [1], 0), ValueError, r"block_size=0"),
    ("token row high", lambda: _tokens(torch.tensor([3])), ValueError, r"rows=\[3\]: .*0 to 2"),
    ("token row low", lambda: _tokens(torch.tensor([-1])), ValueError, r"rows=\[-1\]"),
    ("token page 0", lambda: _tokens(torch.tensor([1]), 0), ValueError, r"page_size=0: expected at least 1"),
    ("token page float", lambda: _tokens(torch.tensor([1]), 4.0), TypeError, r"page_size=4\.0: expected an int"),
    ("token rows float", lambda: _tokens(torch.tensor([1.0])), TypeError, r"rows\.dtype=torch\.float32"),
    (
        "mask int",
        lambda: BlockSparseLayout.from_mask(torch.zeros(1, 2, dtype=INT32), 16),
        TypeError,
        r"mask\.dtype=torch\.int32",
    ),
    (
        "mask length",
        lambda: BlockSparseLayout.from_mask(torch.ones(1, 2, dtype=torch.bool), 16, torch.tensor([33], dtype=INT32)),
        ValueError,
        r"lengths\[0\]=33: expected 0 to 32",
    ),
    (
        "tree parent",
        lambda: BlockSparseLayout.from_tree([torch.zeros(5, dtype=INT32)], [[-1, 1]])[0],
        ValueError,
        r"parents\[0\]\[1\]=1: expected -1 or an earlier",
    ),
    (
        "tree drafts",
        lambda: BlockSparseLayout.from_tree([torch.zeros(1, dtype=INT32)], [[-1, 0]])[0],
        ValueError,
        r"parents\[0\]: expected at most 1",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_bad_layout(make: Make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
