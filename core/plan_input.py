"""What a plan is made from: the same for the host planner, the device planner, and plans that are copied to a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnloom.core.abi import PLAN_HEADER_WORDS, BlockMaskTensor, PlanHeader, PlanParams
from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_positive, check_tensor
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.settings import MOST_WORKERS
from attnloom.core.tiles import Costs, chunk_room

_MOST_STRETCHES = 65535
"""The second side of a grid of CUDA."""


@dataclass(frozen=True, eq=False)
class DeclaredRange:
    """A variant's visible range, compiled.

    Attributes:
        module: an attention module: a CPU's exports the range as ``attnloom_visible``, a GPU's a planner with it.
        words: the variant's parameters, packed; what they point to must outlive the planning, on a GPU the plan's last
            run.
    """

    module: ctypes.CDLL
    words: ctypes.Array[ctypes.c_uint64]


class PlanInput(NamedTuple):
    """What a plan is made from.

    Attributes:
        qo_indptr: int32 ``[num_requests + 1]``, from 0: request r has queries ``qo_indptr[r] : qo_indptr[r + 1]``. On
            the host or on the GPU, as the planner wants it.
        kv_lens: int32 ``[num_requests]``, likewise: KV tokens; may be upper bounds of the true lengths.
        key: heads, tiles, band and device.
        num_workers: workers to balance over, at least 1.
        costs: of an item.
        lockstep: workers that run the same stretch on neighbouring kv heads, a divisor of num_workers and of the kv
            heads: they read the same pages at the same time.
        layout: where the KV lies. With logical positions the band trims nothing: slots are not at their own positions.
        ranges: the variant's visible range; None: the band alone.
        block_mask: KV tiles that need not be computed.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    key: PlanKey
    num_workers: int
    costs: Costs
    lockstep: int = 1
    layout: BlockSparseLayout | None = None
    ranges: DeclaredRange | None = None
    block_mask: BlockMask | None = None

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return self.kv_lens.shape[0]

    @property
    def num_stretches(self) -> int:
        """Stretches of the line of items: workers in lockstep share one."""
        return self.num_workers // self.lockstep

    @property
    def trimmed(self) -> bool:
        """Whether the band trims KV tiles."""
        return self.layout is None or self.layout.positions is None

    def check(self, device: torch.device) -> None:
        """All that can be said without looking at lengths.

        Args:
            device: where the lengths must lie.

        Raises:
            TypeError, ValueError: something of another type, shape, device or value; the message names it.
        """
        check_tensor("qo_indptr", self.qo_indptr, dtype=torch.int32, ndim=1, device=device)
        check_tensor("kv_lens", self.kv_lens, dtype=torch.int32, ndim=1, device=device)
        if self.qo_indptr.shape[0] != self.num_requests + 1:
            raise ValueError(
                f"qo_indptr.shape={tuple(self.qo_indptr.shape)}: expected {self.num_requests + 1} entries, "
                f"one more than requests"
            )
        if check_positive("num_workers", self.num_workers) > MOST_WORKERS:
            raise ValueError(f"num_workers={self.num_workers}: expected at most {MOST_WORKERS}")
        if self.lockstep < 1 or self.num_workers % self.lockstep or self.key.num_kv_heads % self.lockstep:
            raise ValueError(
                f"lockstep={self.lockstep}: expected a divisor of num_workers={self.num_workers} and "
                f"num_kv_heads={self.key.num_kv_heads}"
            )
        if self.key.device.type == "cuda" and self.num_stretches > _MOST_STRETCHES:
            raise ValueError(
                f"num_workers={self.num_workers}: expected at most {_MOST_STRETCHES * self.lockstep} on a GPU, "
                f"{_MOST_STRETCHES} times the {self.lockstep} that run in lockstep"
            )
        if self.block_mask is not None:
            self._check_block_mask(self.block_mask)

    def _check_block_mask(self, mask: BlockMask) -> None:
        if not self.trimmed:
            raise ValueError("block_mask: expected None for a layout with positions, whose slots lie anywhere")
        if mask.block_size != self.key.tile_kv:
            raise ValueError(f"block_mask.block_size={mask.block_size}: expected the KV tile, {self.key.tile_kv}")
        requests = mask.kinds.shape[0]
        if requests not in (1, self.num_requests):
            raise ValueError(
                f"block_mask.kinds.shape[0]={requests}: expected 1 or {self.num_requests}, one per request"
            )

    def check_into(self, into: Plan, tile_capacity: int) -> None:
        """The plan fits into the buffer of another one, array for array.

        Raises:
            ValueError: it has other requests, workers or another key, or room for fewer than ``tile_capacity`` tiles.
        """
        found = (into.key, into.num_requests, into.num_workers, into.lockstep)
        if found != (self.key, self.num_requests, self.num_workers, self.lockstep):
            raise ValueError(
                f"into: expected a plan of {self.num_requests} requests for {self.num_workers} workers in lockstep "
                f"{self.lockstep} with key {self.key}, got {into.num_requests}, {into.num_workers}, {into.lockstep}, "
                f"{into.key}"
            )
        if into.tile_capacity < tile_capacity:
            raise ValueError(
                f"into.tile_capacity={into.tile_capacity}: expected at least {tile_capacity}, as queries need"
            )

    def tiles_for(self, total_q: int) -> int:
        """Query tiles that these requests with this many queries in all have at most."""
        key = self.key
        return self.num_requests + max(total_q, 0) * (key.num_qo_heads // key.num_kv_heads) // key.tile_q

    def words_for(self, tile_capacity: int) -> int:
        """Words of the plan's buffer: plan_words() of csrc/planner/plan.h."""
        return PLAN_HEADER_WORDS + self.num_requests + 1 + 4 * tile_capacity + 5 * self.num_stretches + 3

    def header(self, tile_capacity: int) -> PlanHeader:
        """The plan's header, as a planner takes it."""
        key = self.key
        return PlanHeader(
            self.num_requests,
            0,
            self.num_workers,
            self.lockstep,
            key.num_qo_heads,
            key.num_kv_heads,
            key.tile_q_short,
            key.tile_q,
            key.tile_kv,
            -1 if key.left is None else key.left,
            -1 if key.right is None else key.right,
            self.trimmed,
            tile_capacity,
            key.chunk,
            1,
            chunk_room(key.tile_q) if key.chunk and key.device.type == "cuda" else 0,
        )

    def params(
        self, buffer: Tensor, *, visible: int | None = None, scratch: int | None = None, stream: int | None = None
    ) -> PlanParams:
        """The struct of a planner's call.

        Args:
            buffer: of the plan.
            visible: for the host planner, address of the function that says what is visible.
            scratch: for the device planner, address of a word of 64 bits for each tile, and one more.
            stream: for the device planner.
        """
        return PlanParams(
            self.qo_indptr.data_ptr(),
            self.kv_lens.data_ptr(),
            buffer.data_ptr(),
            self.costs.item,
            self.costs.item_row,
            self.costs.kv_tile,
            self.costs.row,
            visible,
            None if self.ranges is None else ctypes.addressof(self.ranges.words),
            BlockMaskTensor() if self.block_mask is None else self.block_mask.struct(),
            scratch,
            stream,
        )

    def plan(self, buffer: Tensor, *, num_tiles: int, total_q: int, tile_capacity: int) -> Plan:
        """The plan in a buffer."""
        return Plan(
            self.key,
            self.num_requests,
            num_tiles,
            self.num_workers,
            self.lockstep,
            total_q,
            tile_capacity,
            self.costs,
            buffer,
            self.layout,
            self.block_mask,
        )
