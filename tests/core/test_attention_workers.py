"""Any number of workers gives the same attention, and the same plan gives the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnloom.core.arena import arena
from attnloom.core.planner import plan_scan
from tests.core import kernels
from tests.core.problem import make_problem
from tests.core.running import check, run
from tests.tolerance import assert_lse, assert_out

F32 = kernels.Plain(torch.float32, 64)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 16, 132, 1000])
@pytest.mark.parametrize(("qo_lens", "kv_lens"), [([1], [900]), ([1, 1], [64, 640]), ([130, 1], [130, 300])])
def test_workers(num_workers: int, qo_lens: list[int], kv_lens: list[int]) -> None:
    problem = make_problem(qo_lens, kv_lens, num_qo_heads=6, num_kv_heads=3)
    check(kernels.plain_engine(F32, 6, 3, None, 0), problem, problem.answer(), num_workers=num_workers)


@pytest.mark.parametrize(("num_workers", "lockstep"), [(2, 2), (4, 4), (8, 2), (28, 4), (132, 4)])
def test_workers_in_lockstep(num_workers: int, lockstep: int) -> None:
    """Neighbouring workers run one stretch on neighbouring kv heads: the same attention, splits and merges included."""
    problem = make_problem([1, 40, 1, 2], [777, 90, 0, 500], num_qo_heads=8, num_kv_heads=4)
    engine = kernels.plain_engine(F32, 8, 4, None, 0)
    plan = plan_scan(
        problem.qo_indptr,
        problem.layout.lengths,
        engine.plan_key,
        num_workers=num_workers,
        lockstep=lockstep,
        costs=engine.tiles.costs,
        layout=problem.layout,
    )
    assert num_workers == lockstep or plan.num_splits > 0
    answer = problem.answer()
    for _ in range(3):
        out, lse = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, return_lse=True)
        assert_out(out, answer, 64, torch.float32)
        assert_lse(lse, answer, 64)
    assert (arena.arrivals == 0).all()


def test_the_workers_of_a_decode_really_split() -> None:
    problem = make_problem([1], [900], num_qo_heads=4, num_kv_heads=2)
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=7)
    pieces = plan.pieces()
    assert len({worker for worker, *_ in pieces}) > 2
    assert any(begin > 0 for _, _, _, begin, _ in pieces), "no item was split"


@pytest.mark.parametrize("num_workers", [2, 7, 132])
def test_repeated_runs_are_bitwise_equal(num_workers: int) -> None:
    """Whichever thread ends last: states merge in the order of the workers."""
    problem = make_problem([1, 40, 1, 2], [777, 90, 64, 500], num_qo_heads=6, num_kv_heads=3)
    engine = kernels.plain_engine(F32, 6, 3, None, 0)
    first, first_lse = run(engine, problem, num_workers=num_workers)
    for _ in range(25):
        again, lse = run(engine, problem, num_workers=num_workers)
        assert torch.equal(first, again) and torch.equal(first_lse, lse)


def test_arrival_counters_reset_themselves() -> None:
    """A split item counts its pieces; the last one in leaves the counter at zero for the next launch."""
    problem = make_problem([1, 40, 1, 2], [777, 90, 64, 500], num_qo_heads=6, num_kv_heads=3)
    engine = kernels.plain_engine(F32, 6, 3, None, 0)
    for num_workers in (2, 7, 132):
        run(engine, problem, num_workers=num_workers)
        assert arena.arrivals.shape[0] >= num_workers and (arena.arrivals == 0).all()


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    problem = make_problem([1, 40, 1, 2], [777, 90, 64, 500], num_qo_heads=6, num_kv_heads=3)
    engine = kernels.plain_engine(F32, 6, 3, None, 0)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(engine, problem, num_workers=7))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_engines_with_one_plan_key_share_a_plan() -> None:
    """Layers of another dtype or scale use the plan of the first."""
    problem = make_problem([1, 9], [400, 70])
    one, two = (kernels.plain_engine(F32, 4, 2, None, 0) for _ in range(2))
    assert one.plan_key == two.plan_key
    plan = one.plan(problem.qo_indptr, problem.layout, num_workers=3)
    args = (problem.q, problem.k_cache, problem.v_cache)
    assert torch.equal(one.run(plan, *args)[: problem.total_q], two.run(plan, *args)[: problem.total_q])
    windowed = kernels.plain_engine(F32, 4, 2, 16, 0)
    assert windowed.plan_key != one.plan_key


def test_threads_of_the_caller_do_not_meet() -> None:
    """Two engines run at once from four threads: partial states of one launch never reach another."""
    problems = [make_problem([1, 30, 2], [900, 120, 333], num_qo_heads=6, num_kv_heads=3, seed=s) for s in range(4)]
    engine = kernels.plain_engine(F32, 6, 3, None, 0)
    expected = [run(engine, problem, num_workers=7) for problem in problems]

    def repeat(i: int) -> bool:
        return all(
            torch.equal(got, wanted)
            for _ in range(20)
            for got, wanted in zip(run(engine, problems[i], num_workers=7), expected[i], strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))
