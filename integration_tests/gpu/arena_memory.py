"""The arena of partial states, seen as tensors: poisoned before a launch, its counters looked at afterwards."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnloom.core.arena import arena, stream_arenas
from attnloom.core.streams import current_stream
from integration_tests.gpu.storage import DEVICE


class _Words:
    """Memory of a GPU by its address, as torch takes it from other libraries."""

    def __init__(self, address: int, count: int, kind: str) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": kind, "data": (address, False), "version": 3}


def _seen() -> tuple[Tensor, Tensor]:
    """States and arrival counters of the current stream, or on a CPU of this thread."""
    if DEVICE.type == "cpu":
        return arena.states, arena.arrivals
    room = stream_arenas(DEVICE).rooms[current_stream(DEVICE.index)]
    states = torch.as_tensor(_Words(room.states_at, room.num_floats, "<f4"), device=DEVICE)
    return states, torch.as_tensor(_Words(room.arrivals_at, room.num_workers, "<i4"), device=DEVICE)


def poison_arena() -> None:
    """No launch may read a state that it did not write."""
    _seen()[0].fill_(math.nan)


def assert_no_arrivals() -> None:
    """The last worker to arrive at an item has reset its counter."""
    assert not bool(_seen()[1].any()), "arrival counters are not zero after the launch"
