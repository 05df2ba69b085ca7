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
from attnloom.core.errors import AttnloomError
from attnloom.core.streams import capturing, current_stream
from attnloom.core.tiles import chunk_room

_MOST_FLOATS = 2**33
"""Of partial states: csrc/sm80/merge.h counts them by fours, in 32 bits with a sign."""

_READ_BEYOND = 3
"""Workers behind the last whose states a merge on a GPU may read, and not use (csrc/sm80/merge.h)."""


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

    Each is values, a peak and a total (csrc/cpu/chunk_states.h, csrc/sm80/chunks.h).
    """
    return num_workers * (1 + chunk_states) * tile_q * (head_dim_v + 2)


def floats_on_gpu(num_workers: int, tile_q: int, head_dim_v: int, batch_invariant: bool) -> int:
    """What a launch on a GPU takes, whose plan may lie there.

    Raises:
        ValueError: more than the kernels count.
    """
    if batch_invariant:
        return floats_of_chunks(num_workers, tile_q, head_dim_v, chunk_room(tile_q))
    needed = floats(num_workers + _READ_BEYOND, tile_q, head_dim_v)
    if needed >= _MOST_FLOATS:
        raise ValueError(
            f"num_workers={num_workers}: expected partial states of less than {_MOST_FLOATS // 2**28} GiB, they take "
            f"{needed / 2**28:.0f} GiB"
        )
    return needed


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


class DeviceRoom(NamedTuple):
    """Addresses of room for a launch on a GPU."""

    num_floats: int
    num_workers: int
    states_at: int
    arrivals_at: int
    kept: Tensor | None = None  # where the states are a tensor's: until the launch


class StreamArenas:
    """The arenas of a CUDA device, one for each stream on which something was launched.

    They are no tensors: whatever pool torch allocates from when a stream is first used (a graph's, say), they stay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rooms: dict[int, DeviceRoom] = {}
        self._captured: dict[int, tuple[int, int, int]] = {}

    def reserve(self, stream: int, needed: int, num_workers: int) -> DeviceRoom:
        """Room for a launch on ``stream``, the current stream of the current device.

        Growing waits for the device.

        Args:
            stream: handle.
            needed: see :func:`floats_on_gpu`.
            num_workers: of the launch.
        """
        if capturing():
            # A tensor of the graph's pool: other tensors of the graph may have its place after this launch.
            states = torch.empty(needed, dtype=torch.float32, device=self.device)
            arrivals = self._counters(stream, num_workers)
            return DeviceRoom(needed, num_workers, states.data_ptr(), arrivals, states)
        room = self.rooms.get(stream)
        if room is None or room.num_floats < needed or room.num_workers < num_workers:
            if room is not None:
                needed = max(needed, room.num_floats)
                num_workers = max(num_workers, room.num_workers)
                self._release(room.states_at)
            states_at = self._allocate(4 * (needed + num_workers))
            arrivals_at = states_at + 4 * needed
            self._zero(arrivals_at, num_workers, stream)
            room = self.rooms[stream] = DeviceRoom(needed, num_workers, states_at, arrivals_at)
        return room

    def _counters(self, stream: int, num_workers: int) -> int:
        """Address of the counters of the capture under way, zeroed at the start of each replay, reset by each launch.

        Nobody says when a graph is gone, so they stay: a few hundred bytes for each graph that was captured.
        """
        capture = int(device_module(self.device).attnloom_capture(stream))
        known = self._captured.get(stream)
        if known is None or known[0] != capture or known[1] < num_workers:
            address = self._allocate(4 * num_workers)
            self._zero(address, num_workers, stream)
            known = self._captured[stream] = (capture, num_workers, address)
        return known[2]

    def _allocate(self, num_bytes: int) -> int:
        module = device_module(self.device)
        address = module.attnloom_allocate(num_bytes)
        if address is None and not capturing():
            torch.cuda.empty_cache()  # torch holds what it does not use
            address = module.attnloom_allocate(num_bytes)
        if address is None:
            raise torch.OutOfMemoryError(f"{self.device}: no {num_bytes} bytes for the arena of partial states")
        return int(address)

    def _release(self, address: int) -> None:
        if error := device_module(self.device).attnloom_release(address):
            raise AttnloomError(f"{self.device}: the arena was not released: CUDA error {error}")

    def _zero(self, address: int, num_workers: int, stream: int) -> None:
        if error := device_module(self.device).attnloom_zero(address, 4 * num_workers, stream):
            raise AttnloomError(f"{self.device}: arrival counters were not zeroed: CUDA error {error}")


_arenas: dict[torch.device, StreamArenas] = {}


def stream_arenas(device: torch.device) -> StreamArenas:
    """The arenas of a CUDA device (with its index), shared by all engines there."""
    return _arenas.setdefault(device, StreamArenas(device))


def reserve_now(device: torch.device, needed: int, num_workers: int) -> None:
    """Reserve the room of the device's current stream, as an engine does when it is made."""
    with torch.cuda.device(device):
        stream_arenas(device).reserve(current_stream(device.index), needed, num_workers)
