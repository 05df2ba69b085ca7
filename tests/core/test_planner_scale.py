"""Large batches, determinism, and lengths that no plan can take."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import assume, given

from attnloom.core.planner import plan_scan
from attnloom.core.tiles import Costs
from tests.core.planning import TILE_Q, TILE_Q_SHORT, indptr, key_of, scan
from tests.core.strategies import PlanCase, examples, plan_cases


def test_20000_requests() -> None:
    """No cap on requests: every request has its tile, the line ends where it must, the load is even."""
    rng = random.Random(7)
    kv_lens = [rng.randrange(0, 9000) for _ in range(20_000)]
    plan = plan_scan(
        indptr([1] * 20_000),
        torch.tensor(kv_lens, dtype=torch.int32),
        key_of(32, 8),
        num_workers=132,
        costs=Costs(20, 2, 50, 3),
    )
    assert plan.num_tiles == 20_000
    assert plan.tile_request.tolist() == list(range(20_000))
    assert plan.tile_kv_tiles.tolist() == [-(-n // 64) for n in kv_lens]
    executed = plan.worker_tiles()
    assert int(executed.sum()) == 8 * sum(-(-n // 64) for n in kv_lens)
    assert int(executed.max()) <= 1.03 * float(executed.sum()) / 132


@examples(2)
@given(plan_cases())
def test_the_same_lengths_give_the_same_plan(case: PlanCase) -> None:
    first = scan(case)
    scan(PlanCase([3, 1], [500, 20], 4, 2, 5, None, 0))
    second = scan(case)
    for name in ("tile_request", "tile_row", "tile_rows", "tile_kv_tiles", "worker_tile", "worker_head", "worker_kv"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert torch.equal(first.split_end, second.split_end)


@examples(2)
@given(plan_cases())
def test_the_tiles_do_not_depend_on_the_workers(case: PlanCase) -> None:
    """They are a function of the lengths. How many stretches cut the line decides the order of tall ones in it."""
    for tile_q in (TILE_Q_SHORT, TILE_Q):
        one = scan(dataclasses.replace(case, num_workers=1, lockstep=1), tile_q=tile_q)
        many = scan(case, tile_q=tile_q)
        names = ("tile_request", "tile_row", "tile_rows", "tile_kv_tiles")
        lines = [list(zip(*(getattr(plan, name).tolist() for name in names), strict=True)) for plan in (one, many)]
        assert sorted(lines[0]) == sorted(lines[1])
        if tile_q == TILE_Q_SHORT:
            assert lines[0] == sorted(lines[0]) == lines[1]
        assert int(one.worker_tiles().sum()) == int(many.worker_tiles().sum())


@examples(2)
@given(plan_cases())
def test_doubling_the_workers_keeps_every_second_start(case: PlanCase) -> None:
    """Worker w of W begins where its share of the line does, so worker 2w of 2W begins at the same place.

    Where both plans cut items, that is: how many workers there are also decides whether they do. With a request as long
    as the first one they do, unless there is one stretch. And where no query tiles are dealt to as many as there are.
    """
    case = dataclasses.replace(case, qo_lens=[7, *case.qo_lens], kv_lens=[20_000, *case.kv_lens], left=None)
    some = scan(case, tile_q=TILE_Q_SHORT)
    twice = scan(dataclasses.replace(case, num_workers=2 * case.num_workers), tile_q=TILE_Q_SHORT)
    assume(all(bool((plan.worker_kv > 0).any()) for plan in (some, twice)))
    assert torch.equal(twice.worker_tile[::2], some.worker_tile)
    assert torch.equal(twice.worker_head[::2], some.worker_head)
    assert torch.equal(twice.worker_kv[::2], some.worker_kv)


def test_a_very_long_request_does_not_overflow() -> None:
    """Two million tokens, 128 heads: costs pass 2^31."""
    plan = plan_scan(
        indptr([4096]),
        torch.tensor([2_000_000], dtype=torch.int32),
        key_of(128, 8, tiles=(16, 128, 64)),
        num_workers=132,
        costs=Costs(400, 30, 1500, 250),
    )
    executed = plan.worker_tiles()
    assert (executed > 0).all()
    assert int(executed.max()) <= 1.03 * float(executed.sum()) / 132


@pytest.mark.parametrize(
    ("qo_indptr", "kv_lens", "message"),
    [
        ([0, 3, 2], [5, 5], r"qo_indptr\[2\]=2"),
        ([1, 3], [5], r"qo_indptr\[0\]=1"),
        ([0, 1], [-3], r"kv_lens\[0\]=-3"),
        ([0, 1], [5, 5], r"qo_indptr.*\(2,\).*3"),
        ([0, 2, 1, 3], [5, 5, 5], r"qo_indptr\[2\]=1"),
    ],
)
def test_lengths_that_no_plan_can_take(qo_indptr: list[int], kv_lens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_scan(
            torch.tensor(qo_indptr, dtype=torch.int32),
            torch.tensor(kv_lens, dtype=torch.int32),
            key_of(8, 2),
            num_workers=4,
            costs=Costs(1, 0, 1, 1),
        )


@pytest.mark.parametrize("num_workers", [0, -1])
def test_no_workers(num_workers: int) -> None:
    with pytest.raises(ValueError, match=rf"num_workers={num_workers}"):
        plan_scan(
            indptr([1]),
            torch.tensor([5], dtype=torch.int32),
            key_of(8, 2),
            num_workers=num_workers,
            costs=Costs(1, 0, 1, 1),
        )


@pytest.mark.parametrize(("lockstep", "num_workers"), [(0, 4), (3, 4), (2, 3), (4, 4), (-2, 4)])
def test_lockstep_divides_workers_and_kv_heads(lockstep: int, num_workers: int) -> None:
    """Two kv heads."""
    with pytest.raises(ValueError, match=rf"lockstep={lockstep}: .*num_workers={num_workers}.*num_kv_heads=2"):
        plan_scan(
            indptr([1]),
            torch.tensor([5], dtype=torch.int32),
            key_of(8, 2),
            num_workers=num_workers,
            lockstep=lockstep,
            costs=Costs(1, 0, 1, 1),
        )
