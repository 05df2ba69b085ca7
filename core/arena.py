"""The arena: room for partial states, one per thread that launches, shared by engines and layers.

Launches of one thread follow each other, so they may share it; launches of two threads may not.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Arena(threading.local):
    """Partial states and arrival counters of the calling thread."""

    def __init__(self) -> None:
        self.states = torch.empty(0, dtype=torch.float32)
        self.arrivals = torch.zeros(0, dtype=torch.int32)

    def reserve(self, num_workers: int, tile_q: int, head_dim_v: int) -> tuple[Tensor, Tensor]:
        """Room for this many workers; grows, never shrinks.

        Returns:
            states float32 ``[>= 2 * num_workers * tile_q * (head_dim_v + 1)]``,
            arrivals int32 ``[>= num_workers]``, all zero.
        """
        floats = 2 * num_workers * tile_q * (head_dim_v + 1)
        if self.states.shape[0] < floats:
            self.states = torch.empty(floats, dtype=torch.float32)
        if self.arrivals.shape[0] < num_workers:
            self.arrivals = torch.zeros(num_workers, dtype=torch.int32)
        return self.states, self.arrivals


arena = Arena()
