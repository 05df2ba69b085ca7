"""The plan as a person sees it: a table with a line per worker, and arrays of the documented types."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from attnloom.core.plan import PlanKey
from attnloom.core.plan_input import PlanInput
from attnloom.core.planner import HOST
from attnloom.core.tiles import Costs
from tests.core.planning import scan
from tests.core.strategies import PlanCase

COSTS = Costs(item=640, item_row=8, kv_tile=256, row=4)
CASE = PlanCase([1, 40, 1], [900, 300, 0], 4, 2, 5, None, 0)


@pytest.mark.parametrize("lockstep", [1, 2])
def test_it_prints_as_a_table(lockstep: int) -> None:
    plan = scan(dataclasses.replace(CASE, num_workers=6, lockstep=lockstep))
    text = str(plan)
    assert "3 requests" in text and "42 queries" in text and "8/2 heads" in text and "6 workers" in text
    table = [line for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\(", line)]
    assert len(table) == 6
    for worker, line in enumerate(table):
        numbers = [int(n) for n in re.findall(r"-?\d+", line)]
        assert numbers[:2] == [worker, int(plan.worker_tiles()[worker])]
        stretch, lane = divmod(worker, lockstep)
        assert tuple(numbers[2:5]) == (
            int(plan.worker_tile[stretch]),
            int(plan.worker_head[stretch]) * lockstep + lane,
            int(plan.worker_kv[stretch]),
        )
        split_end = int(plan.split_end[stretch])
        assert numbers[5:] == ([split_end * lockstep + lane] if split_end >= 0 else [])


def test_its_arrays_are_int32_views_of_one_buffer() -> None:
    plan = scan(CASE)
    shapes = {
        "qo_indptr": 4,
        "tile_request": plan.num_tiles,
        "tile_row": plan.num_tiles,
        "tile_rows": plan.num_tiles,
        "tile_kv_tiles": plan.num_tiles,
        "worker_tile": 6,
        "worker_head": 6,
        "worker_kv": 6,
        "split_begin": 5,
        "split_end": 5,
    }
    for name, length in shapes.items():
        array = getattr(plan, name)
        assert array.dtype == torch.int32 and array.shape == (length,), name
        assert array.untyped_storage().data_ptr() == plan.buffer.untyped_storage().data_ptr(), name
    assert plan.qo_indptr.tolist() == [0, 1, 41, 42]


@pytest.mark.parametrize("lockstep", [1, 2])
def test_num_splits_counts_the_items_of_several_workers(lockstep: int) -> None:
    plan = scan(dataclasses.replace(CASE, num_workers=14, lockstep=lockstep))
    workers: dict[tuple[int, int], set[int]] = {}
    for worker, tile, head, _, _ in plan.pieces():
        workers.setdefault((tile, head), set()).add(worker)
    assert plan.num_splits == sum(len(who) > 1 for who in workers.values()) > 0


@pytest.mark.parametrize("lockstep", [1, 2])
def test_a_grid_of_cuda_has_room_for_the_stretches(lockstep: int) -> None:
    lengths = torch.tensor([5], dtype=torch.int32)
    key = PlanKey(4, 2, 16, 128, 64, None, 0, torch.device("cuda", 0))

    def check(num_workers: int, key: PlanKey) -> None:
        PlanInput(torch.tensor([0, 1], dtype=torch.int32), lengths, key, num_workers, COSTS, lockstep).check(HOST)

    check(65535 * lockstep, key)
    check(65536 * lockstep, key._replace(device=HOST))
    with pytest.raises(
        ValueError, match=rf"num_workers={65536 * lockstep}: expected at most {65535 * lockstep} on a GPU"
    ):
        check(65536 * lockstep, key)
