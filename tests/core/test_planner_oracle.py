"""The planner's arrays against the brute-force plan in Python integers, element for element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom.core.abi import PlanHeader
from attnloom.core.tiles import chunk_room
from tests.core import planner_oracle
from tests.core.planning import COSTS, TILE_KV, TILE_Q, TILE_Q_SHORT, key_of, scan
from tests.core.strategies import PlanCase, examples, plan_cases


def _same(case: PlanCase, costs: planner_oracle.Costs, tile_q: int = TILE_Q) -> None:
    plan = scan(case, costs, tile_q=tile_q)
    line = planner_oracle.tiles(
        case.qo_lens,
        case.kv_lens,
        group=case.group,
        tile_q_short=TILE_Q_SHORT,
        tile_q=tile_q,
        tile_kv=TILE_KV,
        left=case.left,
        right=case.right,
        stretches=case.stretches,
    )
    assert plan.num_tiles == len(line)
    assert plan.tile_request.tolist() == [tile.request for tile in line]
    assert plan.tile_row.tolist() == [tile.row for tile in line]
    assert plan.tile_rows.tolist() == [tile.rows for tile in line]
    assert plan.tile_kv_tiles.tolist() == [len(tile.kv_tiles) for tile in line]
    starts = planner_oracle.starts(line, case.num_kv_heads // case.lockstep, case.stretches, costs, case.chunk)
    assert plan.worker_tile.tolist() == [tile for tile, _, _ in starts]
    assert plan.worker_head.tolist() == [head for _, head, _ in starts]
    assert plan.worker_kv.tolist() == [kv for _, _, kv in starts]


@examples(12)
@given(
    plan_cases(),
    st.builds(
        planner_oracle.Costs,
        item=st.integers(1, 5000),
        item_row=st.one_of(st.just(0), st.integers(0, 100)),
        kv_tile=st.integers(0, 300),
        row=st.integers(1, 20),
    ),
    st.sampled_from((TILE_Q, TILE_Q, 128, TILE_Q_SHORT)),
)
def test_the_same_integers(case: PlanCase, costs: planner_oracle.Costs, tile_q: int) -> None:
    _same(case, costs, tile_q)


def test_tall_tiles_are_dealt_and_short_ones_follow() -> None:
    """Five tall tiles and three, to three stretches; the tiles of a request begin at rows 0, 32, ..."""
    case = PlanCase([3, 160, 1, 70, 16], [9, 160, 5, 300, 64], 1, 2, 6, None, 0, lockstep=2)
    plan = scan(case)
    hands = [[(1, 0), (1, 96), (3, 32)], [(1, 32), (1, 128), (3, 64)], [(1, 64), (3, 0)]]
    line = [*hands[0], *hands[1], *hands[2], (0, 0), (2, 0), (4, 0)]
    assert list(zip(plan.tile_request.tolist(), plan.tile_row.tolist(), strict=True)) == line


class _Line(NamedTuple):
    """What of a case decides the order of its query tiles."""

    tall: list[bool]  # of each request that has queries
    dealt: int
    stretches: int

    @classmethod
    def of(cls, case: PlanCase) -> _Line:
        rows = [queries * case.group for queries in case.qo_lens if queries]
        tall = [count > TILE_Q_SHORT for count in rows]
        dealt = sum(-(-count // TILE_Q) for count in rows if count > TILE_Q_SHORT)
        return cls(tall, dealt, case.stretches)


_MIXES: dict[str, Callable[[_Line], bool]] = {
    "several tall requests": lambda line: sum(line.tall) > 2 and not all(line.tall),
    "short before tall": lambda line: (False, True) in pairwise(line.tall),
    "tall before short": lambda line: (True, False) in pairwise(line.tall),
    "more for some stretches": lambda line: line.dealt > line.stretches and line.dealt % line.stretches > 0,
    "as many for each stretch": lambda line: line.dealt > line.stretches > 1 and line.dealt % line.stretches == 0,
    "dealt and followed": lambda line: line.dealt > line.stretches > 1 and not all(line.tall),
    "fewer than stretches": lambda line: 1 < line.dealt < line.stretches,
}


def test_the_cases_have_every_mix() -> None:
    """Of tall and short requests, and of tall tiles and stretches: one case of 25 or more."""
    lines: list[_Line] = []

    @settings(max_examples=500, database=None, derandomize=True)
    @given(plan_cases())
    def draw(case: PlanCase) -> None:
        lines.append(_Line.of(case))

    draw()
    assert len(lines) > 100
    found = {name: sum(map(mix, lines)) for name, mix in _MIXES.items()}
    assert min(found.values()) * 25 >= len(lines), found


@pytest.mark.parametrize("num_workers", [1, 5, 132, 1000])
def test_hand_made_edges(num_workers: int) -> None:
    costs = planner_oracle.Costs(item=7, item_row=2, kv_tile=3, row=1)
    for qo_lens, kv_lens in (([], []), ([0], [0]), ([0, 0], [9, 0]), ([1], [0]), ([1] * 20, [0] * 20), ([1], [64])):
        _same(PlanCase(qo_lens, kv_lens, 4, 2, num_workers, None, 0), costs)


@examples(4)
@given(plan_cases())
def test_chunks_are_never_cut_and_their_states_have_room(case: PlanCase) -> None:
    """A piece that continues an item has at most as many chunks as the plan says, one more where it closes it."""
    plan = scan(case)
    header = PlanHeader.from_address(plan.buffer.data_ptr())
    assert header.chunk == case.chunk
    needed = 1
    for _, tile, _, begin, end in plan.pieces():
        closes = end == int(plan.tile_kv_tiles[tile])
        if case.chunk:
            assert begin % case.chunk == 0 and (closes or end % case.chunk == 0)
            if begin > 0:
                needed = max(needed, -(-(end - begin) // case.chunk) + closes)
    assert header.chunk_states == needed


@examples(8)
@given(plan_cases(), st.sampled_from((2, 3, 4, 8)), st.lists(st.integers(1, 9000), min_size=9, max_size=9))
def test_room_for_the_states_of_chunks_is_bounded_on_a_gpu(case: PlanCase, room: int, kv_lens: list[int]) -> None:
    """The same integers as the oracle's, and no piece that continues an item leaves more states than there is room."""
    chunk = max(1, case.chunk)
    case = replace(case, chunk=chunk, kv_lens=kv_lens[: len(case.qo_lens)])
    tiles = (TILE_Q_SHORT, next(tile_q for tile_q in (128, 256, 341, 512) if chunk_room(tile_q) == room), TILE_KV)
    heads = case.num_kv_heads
    band = {"left": case.left, "right": case.right}
    plan = scan(case, key=key_of(case.group * heads, heads, tiles=tiles, chunk=chunk, device="cuda:0", **band))
    line = planner_oracle.tiles(
        case.qo_lens,
        case.kv_lens,
        group=case.group,
        tile_q_short=tiles[0],
        tile_q=tiles[1],
        tile_kv=TILE_KV,
        stretches=case.stretches,
        **band,
    )
    starts = planner_oracle.starts(line, heads // case.lockstep, case.stretches, COSTS, chunk, room)
    assert list(zip(plan.worker_tile.tolist(), plan.worker_head.tolist(), plan.worker_kv.tolist(), strict=True)) == (
        starts
    )
    assert starts == sorted(starts)
    needed = 1
    for _, tile, _, begin, end in plan.pieces():
        if begin > 0:
            closes = end == int(plan.tile_kv_tiles[tile])
            needed = max(needed, -(-(end - begin) // chunk) + closes)
    header = PlanHeader.from_address(plan.buffer.data_ptr())
    assert header.chunk_states == needed <= room == header.chunk_room


def test_equal_cuts_of_one_long_decode() -> None:
    """One decode of 80 kv tiles over 8 workers: ten tiles each, the first a little fewer for loading Q."""
    costs = planner_oracle.Costs(item=1, item_row=0, kv_tile=100, row=0)
    plan = scan(PlanCase([1], [80 * TILE_KV], 4, 1, 8, None, 0), costs)
    assert plan.worker_tiles().tolist() == [10] * 8
    assert plan.worker_kv.tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 0]
    assert plan.split_end.tolist() == [7] + [-1] * 7
