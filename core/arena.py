"""The arena: room for partial states, shared by engines and layers whose launches follow each other.

On a CPU those are the launches of one thread; on a GPU those of one stream, whoever launches. A graph that is being
captured takes the states' room from its own pool, and counters of its own: graphs may be replayed side by side, on any
stream, as far as torch lets them.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from attnloom.core.device_module import device_module
from attnloom.core.streams import capturing, current_stream


class Room(NamedTuple):
    """States float32 ``[at least what was asked for]``, arrivals int32 ``[workers]``, all zero."""

    states: Tensor
    arrivals: Tensor
    # Kept beside the tensors, which take longer to ask.
    num_floats: int
    num_workers: int
    states_at: int
    arrivals_at: int


def _room(states: Tensor, arrivals: Tensor) -> Room:
    return Room(states, arrivals, states.shape[0], arrivals.shape[0], states.data_ptr(), arrivals.data_ptr())


def floats(num_workers: int, tile_q: int, head_dim_v: int) -> int:
    """Floats that the partial states of a launch take: at most two pieces of a worker, values and LSE."""
    return 2 * num_workers * tile_q * (head_dim_v + 1)


def floats_of_chunks(num_workers: int, tile_q: int, head_dim_v: int, chunk_states: int) -> int:
    """The same for the batch_invariant mode: a worker's fold, and the states of chunks that it leaves to others.

    Each is values, a peak and a total (csrc/cpu/chunk_states.h).
    """
    return num_workers * (1 + chunk_states) * tile_q * (head_dim_v + 2)


class Arena(threading.local):
    """Partial states and arrival counters of the calling thread."""

    def __init__(self) -> None:
        self.states = torch.empty(0, dtype=torch.float32)
        self.arrivals = torch.zeros(0, dtype=torch.int32)

    def reserve(self, num_workers: int, needed: int) -> Room:
        """Room for this many workers and floats; grows, never shrinks."""
        if self.states.shape[0] < needed:
            self.states = torch.empty(needed, dtype=torch.float32)
        if self.arrivals.shape[0] < num_workers:
            self.arrivals = torch.zeros(num_workers, dtype=torch.int32)
        return _room(self.states, self.arrivals)


arena = Arena()


class StreamArenas:
    """The arenas of a CUDA device, one for each stream on which something was launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms: dict[int, Room] = {}
        self._captured: dict[int, tuple[int, Tensor]] = {}

    def reserve(self, stream: int, needed: int, num_workers: int) -> Room:
        """Room for a launch on ``stream``, the current stream of the current device.

        A room that became too small goes back to torch's allocator, which gives it out again behind the launches that
        use it.

        Args:
            stream: handle.
            needed: see :func:`floats`.
            num_workers: of the launch.
        """
        if capturing():
            states = torch.empty(needed, dtype=torch.float32, device=self.device)
            return _room(states, self._counters(stream, num_workers))
        room = self._rooms.get(stream)
        if room is None or room.num_floats < needed or room.num_workers < num_workers:
            if room is not None:
                needed = max(needed, room.num_floats)
                num_workers = max(num_workers, room.num_workers)
            states = torch.empty(needed, dtype=torch.float32, device=self.device)
            arrivals = torch.zeros(num_workers, dtype=torch.int32, device=self.device)
            room = self._rooms[stream] = _room(states, arrivals)
        return room

    def _counters(self, stream: int, num_workers: int) -> Tensor:
        """Counters of the capture under way, zeroed at the start of each replay and reset by each launch.

        Kept until the stream is captured again: no other tensor of this graph may take their place, and one of another
        graph may, because this one zeroes them anew.
        """
        capture = int(device_module(self.device).attnloom_capture(stream))
        known = self._captured.get(stream)
        if known is None or known[0] != capture or known[1].shape[0] < num_workers:
            known = (capture, torch.zeros(num_workers, dtype=torch.int32, device=self.device))
            self._captured[stream] = known
        return known[1]


_arenas: dict[torch.device, StreamArenas] = {}


def stream_arenas(device: torch.device) -> StreamArenas:
    """The arenas of a CUDA device (with its index), shared by all engines there."""
    return _arenas.setdefault(device, StreamArenas(device))


def current_room(device: torch.device, needed: int, num_workers: int) -> Room:
    """The room of the device's current stream, as an engine reserves it when it is made."""
    with torch.cuda.device(device):
        return stream_arenas(device).reserve(current_stream(device.index), needed, num_workers)
