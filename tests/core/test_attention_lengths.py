"""Lengths at their edges, and lengths that turn out shorter than the plan believed."""

from __future__ import annotations

import math

import pytest
import torch

from tests.core import kernels
from tests.core.problem import make_problem
from tests.core.running import assert_untouched, check, run, strided_out
from tests.oracle import Band
from tests.tolerance import assert_lse, assert_out

F32 = kernels.Plain(torch.float32, 64)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 132])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (None, None), (20, 0), (20, 20), (0, 0)])
def test_edges(num_workers: int, left: int | None, right: int | None) -> None:
    """No query, no key, one key, more queries than keys, exactly one tile, one more than a tile."""
    problem = make_problem(
        [1, 0, 5, 9, 1, 1, 70, 2, 0], [0, 0, 1, 4, 64, 65, 70, 128, 33], readable=Band(left, right), block_size=5
    )
    engine = kernels.plain_engine(F32, 4, 2, left, right)
    check(engine, problem, problem.answer(Band(left, right)), num_workers=num_workers)


def test_rows_without_a_visible_key_are_zero_and_minus_infinity() -> None:
    problem = make_problem([3, 6], [0, 2])
    out, lse = run(kernels.plain_engine(F32, 4, 2, None, 0), problem, num_workers=3)
    blind = [0, 1, 2, 3, 4, 5, 6]
    assert (out[blind] == 0).all()
    assert (lse[blind] == -math.inf).all()
    assert torch.isfinite(lse[7:]).all()


@pytest.mark.parametrize("num_workers", [1, 3, 7, 132])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (None, None), (50, 0), (50, 50)])
def test_planned_lengths_are_upper_bounds(num_workers: int, left: int | None, right: int | None) -> None:
    kv_lens = [0, 1, 30, 64, 200, 333, 5]
    upper = [700, 64, 31, 65, 800, 333, 900]
    problem = make_problem([1, 1, 5, 12, 40, 1, 9], kv_lens, readable=Band(left, right))
    engine = kernels.plain_engine(F32, 4, 2, left, right)
    check(engine, problem, problem.answer(Band(left, right)), num_workers=num_workers, upper_bounds=upper)


@pytest.mark.parametrize("num_workers", [2, 7, 132])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (70, 0)])
def test_lengths_lowered_in_place_after_planning(num_workers: int, left: int | None, right: int | None) -> None:
    """The kernel reads the layout's own lengths; one plan serves every shorter batch."""
    qo_lens, kv_lens = [1, 20, 3], [500, 300, 90]
    problem = make_problem(qo_lens, kv_lens)
    engine = kernels.plain_engine(F32, 4, 2, left, right)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=num_workers)
    for shorter in ([499, 300, 90], [64, 63, 65], [0, 1, 2], [1, 0, 90], kv_lens):
        problem.layout.lengths.copy_(torch.tensor(shorter, dtype=torch.int32))
        buffer, out = strided_out(problem, engine)
        _, lse = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, out=out, return_lse=True)
        answer = problem.answer(Band(left, right), kv_lens=shorter)
        assert_out(out[: problem.total_q], answer, 64, torch.float32)
        assert_lse(lse[: problem.total_q], answer, 64)
        assert_untouched(buffer, out, problem.total_q)


@pytest.mark.parametrize("num_workers", [1, 3, 7, 132])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (50, 0)])
def test_a_plan_for_shorter_lengths_is_still_right(num_workers: int, left: int | None, right: int | None) -> None:
    """Only the balance suffers: the last piece of an item runs to the end that the true length gives."""
    kv_lens = [500, 1, 300, 64]
    problem = make_problem([1, 1, 5, 12], kv_lens, readable=Band(left, right))
    engine = kernels.plain_engine(F32, 4, 2, left, right)
    answer = problem.answer(Band(left, right))
    check(engine, problem, answer, num_workers=num_workers, upper_bounds=[70, 0, 299, 1])
