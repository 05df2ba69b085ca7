"""The batch_invariant mode of a GPU, as far as a machine without one can say: what is built, and the room it gets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnloom import variants
from attnloom.core import direct
from attnloom.core.abi import PlanHeader
from attnloom.core.arena import DeviceRoom, floats, floats_of_chunks, floats_on_gpu
from attnloom.core.direct import DirectPath
from attnloom.core.jit.toolchain import recipe
from attnloom.core.kernels import attention_spec
from attnloom.core.planner import plan_scan
from attnloom.core.templates import NO_HOOKS, Template
from attnloom.core.tiles import CHUNK_TOKENS, CPU, HEAD_DIMS, SM80, chunk_room
from tests.core.planning import indptr, key_of
from tests.core.strategies import examples

TILES = SM80.tiles_for(128, "90a", batch_invariant=True)


def test_every_query_tile_is_of_64_rows_at_most() -> None:
    for head_dim in HEAD_DIMS:
        for target in ("80", "89", "90a", "100", "120"):
            tiles = SM80.tiles_for(head_dim, target, batch_invariant=True)
            assert tiles.tile_q == 64 and CHUNK_TOKENS % tiles.tile_kv == 0
    assert CPU.tiles_for(128, batch_invariant=True) is CPU.tiles


def test_the_mode_is_a_module_of_its_own_that_contracts_nothing() -> None:
    ordinary, alike = (
        attention_spec("sm80", torch.bfloat16, 128, 128, variants.Causal(), "90a", batch_invariant=mode)
        for mode in (False, True)
    )
    assert ordinary.name != alike.name
    usual, exact = recipe(ordinary.family, "90a"), recipe(alike.family, "90a")
    assert exact.compile_flags == (*usual.compile_flags, "-fmad=false")
    assert (exact.arch, exact.link_flags) == (usual.arch, usual.link_flags)
    text = alike.sources[0].text
    assert not isinstance(text, str)
    assert "Shape<false>" not in text.text(), "there is one kernel for all query tiles"


@examples(2)
@given(
    requests=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3_000_000)), min_size=1, max_size=4),
    num_kv_heads=st.sampled_from((1, 2, 8)),
    group=st.sampled_from((1, 4, 7)),
    num_workers=st.sampled_from((1, 3, 8, 132, 264)),
    decode=st.booleans(),
    left=st.one_of(st.none(), st.integers(0, 200_000)),
)
def test_the_arena_holds_the_states_of_any_plan(
    requests: list[tuple[int, int]], num_kv_heads: int, group: int, num_workers: int, decode: bool, left: int | None
) -> None:
    """Whatever the lengths are, which a device alone may know; and the cuts lie at whole chunks."""
    tile_q = TILES.tile_q_short if decode else TILES.tile_q
    chunk = CHUNK_TOKENS // TILES.tile_kv
    key = key_of(
        group * num_kv_heads,
        num_kv_heads,
        left=left,
        tiles=(TILES.tile_q_short, tile_q, TILES.tile_kv),
        chunk=chunk,
        device="cuda:0",
    )
    plan = plan_scan(
        indptr([1 if decode else queries for queries, _ in requests]),
        torch.tensor([length for _, length in requests], dtype=torch.int32),
        key,
        num_workers=num_workers,
        lockstep=math.gcd(num_kv_heads, num_workers),
        costs=TILES.costs,
    )
    states = PlanHeader.from_address(plan.buffer.data_ptr()).chunk_states
    assert floats_of_chunks(num_workers, tile_q, 128, states) <= floats_on_gpu(num_workers, tile_q, 128, True)
    most = 1
    for _, tile, _, begin, end in plan.pieces():
        if begin > 0:
            assert begin % chunk == 0
            most = max(most, -(-(end - begin) // chunk) + (end == int(plan.tile_kv_tiles[tile])))
    assert most == states


@pytest.mark.parametrize(("tile_q", "length"), [(16, 2_000_000), (64, 600_000)])
def test_one_long_request_still_feeds_every_worker(tile_q: int, length: int) -> None:
    """Its share of chunks has room: cuts are where they would be without a bound."""
    key = key_of(8, 1, tiles=(16, tile_q, 64), chunk=CHUNK_TOKENS // 64, device="cuda:0")
    plan = plan_scan(
        indptr([1 if tile_q == 16 else 8]),
        torch.tensor([length], dtype=torch.int32),
        key,
        num_workers=33,
        costs=TILES.costs,
    )
    loads = plan.worker_tiles()
    assert int(loads.min()) > 0 and int(loads.max()) <= int(loads.float().mean()) + 2 * CHUNK_TOKENS // 64


def test_room_is_never_less_than_a_cut_needs() -> None:
    assert [chunk_room(tile_q) for tile_q in (16, 64, 128, 1024)] == [64, 16, 8, 2]


class Arenas:
    """Stands for the arenas of a device: keeps what it is asked for."""

    def __init__(self) -> None:
        self.rooms: dict[int, DeviceRoom] = {}
        self.asked: list[tuple[int, int]] = []

    def reserve(self, stream: int, needed: int, num_workers: int) -> DeviceRoom:
        self.asked.append((needed, num_workers))
        return DeviceRoom(needed, num_workers, 64, 128)


@pytest.mark.parametrize("tile_q", [16, 64])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_launch_asks_for_that_room(monkeypatch: pytest.MonkeyPatch, tile_q: int, batch_invariant: bool) -> None:
    arenas, launched = Arenas(), []
    monkeypatch.setattr(direct, "stream_arenas", lambda device: arenas)
    monkeypatch.setattr(direct, "current_device", lambda: 0)
    monkeypatch.setattr(direct, "current_stream", lambda index: 7)
    monkeypatch.setattr(direct, "capturing", lambda: False)
    module = {"attnloom_run": lambda argument: launched.append(argument) or 0}
    path = DirectPath("kernel", module, torch.device("cpu", 0), 128, (8, 2), batch_invariant)  # type: ignore[arg-type]
    rows = torch.empty(5, 8, 128)
    numbers = (5, 264, 16, tile_q, 2)
    cache = torch.empty(3, 16, 2, 128)
    tensors = (rows, cache, cache, rows)
    template = Template(*tensors, (1.0, 1.0, 1.0), (False, False), numbers, (8, 2))
    path._launch(template, *tensors, None, NO_HOOKS)
    needed = 264 * (1 + chunk_room(tile_q)) * tile_q * (128 + 2) if batch_invariant else floats(264 + 3, tile_q, 128)
    assert arenas.asked == [(needed, 264)] and len(launched) == 1
