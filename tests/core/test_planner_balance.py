"""Balance, counted in executed KV tiles and in the cost model, with Algorithm 1 of FlashInfer as the yardstick."""

from __future__ import annotations

import random

import pytest
import torch

from attnloom.core.plan import Plan
from attnloom.core.planner import plan_algorithm1, plan_scan
from attnloom.core.tiles import CPU, Costs
from tests.core.planning import indptr, key_of

NUM_WORKERS = 132


def zipf_lengths(count: int, mean: int, seed: int) -> list[int]:
    """Lengths with a long tail, scaled to a mean."""
    rng = random.Random(seed)
    raw = [1.0 / rng.uniform(0.02, 1.0) for _ in range(count)]
    return [max(1, round(x * mean * count / sum(raw))) for x in raw]


def worker_costs(plan: Plan) -> list[int]:
    """Cost of each worker's pieces by the cost model; what an item costs beside KV tiles goes to each of its pieces."""
    rows = plan.tile_rows.tolist()
    found = [0] * plan.num_workers
    costs = plan.costs
    for worker, tile, _, begin, end in plan.pieces():
        beside = costs.item + costs.item_row * rows[tile]
        found[worker] += beside + (end - begin) * (costs.kv_tile + costs.row * rows[tile])
    return found


def _plan(qo_lens: list[int], kv_lens: list[int], costs: Costs, tiles: tuple[int, int, int]) -> Plan:
    return plan_scan(
        indptr(qo_lens),
        torch.tensor(kv_lens, dtype=torch.int32),
        key_of(32, 8, tiles=tiles),
        num_workers=NUM_WORKERS,
        costs=costs,
    )


@pytest.mark.parametrize("seed", range(5))
def test_decode_of_256_requests(seed: int) -> None:
    """The step of the issue: 256 requests, mean 4096 tokens, 32/8 heads, KV tile 64, 132 workers."""
    tiles = CPU.tiles
    plan = _plan([1] * 256, zipf_lengths(256, 4096, seed), tiles.costs, (tiles.tile_q_short, tiles.tile_q, 64))
    executed = plan.worker_tiles()
    mean = float(executed.sum()) / NUM_WORKERS
    yardstick = plan_algorithm1(plan)
    assert int(yardstick.worker_tiles.sum()) == int(executed.sum())
    assert int(executed.max()) <= 1.03 * mean
    assert int(executed.max()) <= int(yardstick.worker_tiles.max())
    assert max(worker_costs(plan)) <= yardstick.makespan


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batch(seed: int) -> None:
    """Prefills among decodes: a prefill's KV tile costs more, so the measure is the cost, not the count."""
    rng = random.Random(seed)
    kv_lens = zipf_lengths(200, 4096, seed)
    qo_lens = [min(kv, 1 if rng.random() < 0.9 else rng.randrange(64, 512)) for kv in kv_lens]
    tiles = CPU.tiles
    plan = _plan(qo_lens, kv_lens, tiles.costs, (tiles.tile_q_short, tiles.tile_q, 64))
    costs = worker_costs(plan)
    assert max(costs) <= 1.03 * sum(costs) / NUM_WORKERS
    # A stretch's two ends are each rounded to half a KV tile of the dearest query tile, and one lies inside an item.
    rounding = plan.costs.of(int(plan.tile_rows.max()), 1)
    assert max(costs) <= plan_algorithm1(plan).makespan + rounding


def test_algorithm1_schedules_the_same_tiles() -> None:
    """The yardstick is real: its longest chunk respects the bound and every tile is scheduled."""
    plan = _plan([1] * 64, zipf_lengths(64, 2000, 1), Costs(1, 1, 10, 1), (16, 64, 64))
    schedule = plan_algorithm1(plan)
    assert schedule.worker_tiles.shape == (NUM_WORKERS,)
    assert int(schedule.worker_tiles.sum()) == 8 * int(plan.tile_kv_tiles.sum())
    assert schedule.makespan == int(schedule.worker_cost.max())
    bound = -(-8 * int(plan.tile_kv_tiles.sum()) // NUM_WORKERS)
    expected_chunks = 8 * sum(max(1, -(-n // bound)) for n in plan.tile_kv_tiles.tolist())
    assert schedule.num_chunks == expected_chunks
