"""Slots that must not be read: NaN, Inf and huge numbers there never change a bit of the result."""

from __future__ import annotations

import pytest
import torch

from tests.core import kernels
from tests.core.problem import make_problem
from tests.core.running import check, run
from tests.oracle import Band

F32 = kernels.Plain(torch.float32, 64)


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), -float("inf"), 3e38, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unread_slots_never_reach_the_result(filler: float, dtype: torch.dtype) -> None:
    band = Band(40, 0)
    problem = make_problem([1, 3, 30], [131, 77, 190], dtype=dtype, block_size=16, readable=band)
    written = [~torch.isnan(c) & ~torch.isinf(c) for c in (problem.k_cache, problem.v_cache)]
    engine = kernels.plain_engine(kernels.Plain(dtype, 64), 4, 2, band.left, band.right)
    expected = run(engine, problem, num_workers=5)
    for cache, real in zip((problem.k_cache, problem.v_cache), written, strict=True):
        cache[~real] = filler
    for got, before in zip(run(engine, problem, num_workers=5), expected, strict=True):
        assert torch.equal(got, before)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100])
@pytest.mark.parametrize("qo_len", [1, 20])
def test_pages_left_of_a_window(block_size: int, window: int, qo_len: int) -> None:
    band = Band(window - 1, 0)
    problem = make_problem([qo_len, qo_len], [300, 211], block_size=block_size, readable=band)
    engine = kernels.plain_engine(F32, 4, 2, band.left, band.right)
    check(engine, problem, problem.answer(band), num_workers=4)


def test_indices_past_the_last_block_are_not_followed() -> None:
    """A row of a page table may hold anything after its last block, though the plan believes the row to be longer."""
    problem = make_problem([1, 5], [70, 30], table="page_table")
    layout = problem.layout
    for r, ids in enumerate(problem.block_ids):
        start = int(layout.starts[r])
        layout.indices[start + len(ids) : start + len(ids) + 2] = torch.tensor([-1, 2**31 - 1], dtype=torch.int32)
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    check(engine, problem, problem.answer(), num_workers=7, upper_bounds=[100, 60])


def test_a_window_that_excludes_every_key() -> None:
    """Queries past the keys that a symmetric window of one key could reach: only the diagonal is left."""
    band = Band(0, 0)
    problem = make_problem([8], [3], readable=band)
    engine = kernels.plain_engine(F32, 4, 2, 0, 0)
    answer = problem.answer(band)
    assert answer.visible.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    check(engine, problem, answer, num_workers=3)
