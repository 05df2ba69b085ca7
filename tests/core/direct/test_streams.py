"""Arenas belong to streams, and to captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnloom.core import arena, direct
from attnloom.core.direct import DirectPath
from tests.core.direct.fakes import DEVICE, Kernel, Memory, launch, plan_of, step


def test_streams_have_arenas_of_their_own(path: Callable[[Kernel], DirectPath]) -> None:
    arenas = arena.stream_arenas(DEVICE)
    one, other = arenas.reserve(1, 1000, 4), arenas.reserve(2, 1000, 4)
    assert one.states_at != other.states_at and one.arrivals_at != other.arrivals_at
    assert arenas.reserve(1, 900, 4) is one
    grown = arenas.reserve(1, 2000, 2)
    assert grown.num_floats == 2000 and grown.num_workers == 4
    assert one.states_at not in Memory.blocks and grown.states_at in Memory.blocks
    assert arena.stream_arenas(DEVICE) is arenas


def test_partial_states_beyond_what_a_kernel_counts_are_refused() -> None:
    assert arena.floats_on_gpu(2**20, 16, 128, False) == 2 * (2**20 + 3) * 16 * 129
    with pytest.raises(ValueError, match=r"num_workers=1048576: .* less than 32 GiB, they take 129 GiB"):
        arena.floats_on_gpu(2**20, 128, 128, False)


def test_a_launch_follows_the_stream_and_its_room(
    path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    made, tensors = path(kernel), step()
    arenas = arena.stream_arenas(DEVICE)
    for stream in (5, 6, 5):
        monkeypatch.setattr(direct, "current_stream", lambda index, stream=stream: stream)
        launch(made, tensors, plan_of())
        got = kernel.launched[-1]
        assert got.stream == stream and got.arena == arenas.rooms[stream].states_at
    arenas.reserve(5, 10**6, 20)
    launch(made, tensors, plan_of())
    assert kernel.launched[-1].arena == arenas.rooms[5].states_at


def test_a_capture_has_room_of_its_own(path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    made, tensors = path(kernel), step()
    launch(made, tensors, plan_of())
    with monkeypatch.context() as patch:
        patch.setattr(direct, "capturing", lambda: True)
        patch.setattr(arena, "capturing", lambda: True)
        launch(made, tensors, plan_of())
        launch(made, tensors, plan_of())
    launch(made, tensors, plan_of())
    before, first, second, after = kernel.launched
    assert before.arena == after.arena and before.arrivals == after.arrivals
    assert first.arrivals == second.arrivals != before.arrivals
    assert before.arena not in (first.arena, second.arena)
