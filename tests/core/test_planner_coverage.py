"""A plan gives every (query tile, kv head, kv tile) to exactly one worker, in contiguous stretches."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given

from tests.core import planner_oracle
from tests.core.planning import TILE_KV, TILE_Q, TILE_Q_SHORT, scan
from tests.core.strategies import PlanCase, examples, plan_cases


@examples(8)
@given(plan_cases())
def test_rows_are_covered_once(case: PlanCase) -> None:
    """Every folded row of every request lies in one query tile."""
    plan = scan(case)
    rows: Counter[tuple[int, int]] = Counter()
    for tile in range(plan.num_tiles):
        first, count = int(plan.tile_row[tile]), int(plan.tile_rows[tile])
        assert 1 <= count <= TILE_Q
        rows.update((int(plan.tile_request[tile]), first + i) for i in range(count))
    expected = {(r, row) for r, qo_len in enumerate(case.qo_lens) for row in range(qo_len * case.group)}
    assert set(rows) == expected and set(rows.values()) <= {1}


@examples(8)
@given(plan_cases())
def test_work_is_covered_once(case: PlanCase) -> None:
    """Every (request, folded row, kv head, kv tile) that holds a visible key is run by one worker."""
    plan = scan(case)
    line = planner_oracle.tiles(
        case.qo_lens,
        case.kv_lens,
        group=case.group,
        tile_q_short=TILE_Q_SHORT,
        tile_q=TILE_Q,
        tile_kv=TILE_KV,
        left=case.left,
        right=case.right,
        stretches=case.stretches,
    )
    done: Counter[tuple[int, int, int]] = Counter()
    for worker, tile, head, begin, end in plan.pieces():
        assert 0 <= worker < case.num_workers
        assert 0 <= begin <= end <= len(line[tile].kv_tiles)
        done.update((tile, head, line[tile].kv_tiles[kv]) for kv in range(begin, end))
    expected = {
        (index, head, kv)
        for index, tile in enumerate(line)
        for head in range(case.num_kv_heads)
        for kv in tile.kv_tiles
    }
    assert set(done) == expected and set(done.values()) <= {1}


@examples(8)
@given(plan_cases())
def test_every_item_is_written_once(case: PlanCase) -> None:
    """The pieces of each (query tile, kv head), also of one that sees no key, meet without gap, by rising worker."""
    plan = scan(case)
    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for worker, tile, head, begin, end in plan.pieces():
        pieces.setdefault((tile, head), []).append((worker, begin, end))
    assert set(pieces) == {(tile, head) for tile in range(plan.num_tiles) for head in range(case.num_kv_heads)}
    for (tile, _), parts in pieces.items():
        parts.sort()
        assert parts[0][1] == 0 and parts[-1][2] == int(plan.tile_kv_tiles[tile])
        for (worker, _, end), (following, begin, _) in pairwise(parts):
            assert worker < following and end == begin


@examples(8)
@given(plan_cases())
def test_at_most_two_partials_a_worker(case: PlanCase) -> None:
    plan = scan(case)
    partials: Counter[int] = Counter()
    openings: Counter[int] = Counter()
    for worker, tile, _, begin, end in plan.pieces():
        whole = begin == 0 and end == int(plan.tile_kv_tiles[tile])
        partials[worker] += not whole
        openings[worker] += begin == 0 and not whole
    assert all(count <= 2 for count in partials.values())
    assert all(count <= 1 for count in openings.values())


@examples(8)
@given(plan_cases())
def test_split_end_names_the_last_contributor(case: PlanCase) -> None:
    """A stretch that opens an item and does not close it names the last stretch of that item; all others hold -1."""
    plan = scan(case)
    workers: dict[tuple[int, int], list[int]] = {}
    for worker, tile, head, _, _ in plan.pieces():
        assert worker % case.lockstep == head % case.lockstep, "a worker left its kv heads"
        workers.setdefault((tile, head), []).append(worker // case.lockstep)
    expected = [-1] * case.stretches
    for who in workers.values():
        if len(who) > 1:
            expected[min(who)] = max(who)
    assert [int(last) for last in plan.split_end] == expected


@examples(4)
@given(plan_cases())
def test_starts_rise_and_worker_tiles_add_up(case: PlanCase) -> None:
    plan = scan(case)
    starts = list(zip(plan.worker_tile.tolist(), plan.worker_head.tolist(), plan.worker_kv.tolist(), strict=True))
    assert len(starts) == case.stretches + 1
    assert starts == sorted(starts) and starts[-1] == (plan.num_tiles, 0, 0)
    executed = [0] * case.num_workers
    for worker, _, _, begin, end in plan.pieces():
        executed[worker] += end - begin
    assert plan.worker_tiles().tolist() == executed
