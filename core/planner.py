"""The host planner: lengths to a plan, by the scan of csrc/planner/scan.h; Algorithm 1 is the yardstick beside it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.abi import PlanParams
from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_positive
from attnloom.core.host import host_module
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.plan_input import DeclaredRange, PlanInput
from attnloom.core.tiles import Costs

HOST = torch.device("cpu")


def plan_scan(
    qo_indptr: Tensor,
    kv_lens: Tensor,
    key: PlanKey,
    *,
    num_workers: int,
    lockstep: int = 1,
    costs: Costs,
    layout: BlockSparseLayout | None = None,
    ranges: DeclaredRange | None = None,
    block_mask: BlockMask | None = None,
    pinned: bool = False,
    tile_capacity: int | None = None,
) -> Plan:
    """Plan a step: integer costs, a prefix sum, and an equal contiguous stretch for each worker.

    Stream-K (arXiv 2301.03598) over the items of attention. Deterministic; linear in requests.

    Args:
        pinned: whether the buffer is page-locked, for a copy to a GPU.
        tile_capacity: room for query tiles; None: what these lengths may need.
        Others: see :class:`attnloom.core.plan_input.PlanInput`; lengths are on the host.

    Raises:
        TypeError, ValueError: arguments of another type, shape or order; the message names the value.
    """
    given = PlanInput(qo_indptr, kv_lens, key, num_workers, costs, lockstep, layout, ranges, block_mask)
    return plan_on_host(given, pinned=pinned, tile_capacity=tile_capacity)


def plan_on_host(given: PlanInput, *, pinned: bool = False, tile_capacity: int | None = None) -> Plan:
    """:func:`plan_scan` of what is ``given``."""
    given.check(HOST)
    total_q = queries_of(given.qo_indptr)
    if not (given.qo_indptr.is_contiguous() and given.kv_lens.is_contiguous()):
        given = given._replace(qo_indptr=given.qo_indptr.contiguous(), kv_lens=given.kv_lens.contiguous())
    if given.block_mask is not None:
        _check_covers(given.block_mask, given.kv_lens)
    capacity = given.tiles_for(total_q)
    if tile_capacity is not None:
        if capacity > tile_capacity:
            raise ValueError(f"qo_indptr[-1]={total_q}: expected query tiles for {tile_capacity}, may need {capacity}")
        capacity = tile_capacity
    buffer = torch.empty(given.words_for(capacity), dtype=torch.int32, pin_memory=pinned)
    header = given.header(capacity)
    visible = None
    if given.ranges is not None:
        visible = ctypes.cast(given.ranges.module.attnloom_visible, ctypes.c_void_p).value
    params = given.params(buffer, visible=visible)
    num_tiles = host_module().attnloom_plan_scan(ctypes.byref(params), ctypes.byref(header))
    if num_tiles < 0:
        raise _bad_lengths(-1 - num_tiles, given.qo_indptr, given.kv_lens)
    return given.plan(buffer, num_tiles=num_tiles, total_q=total_q, tile_capacity=capacity)


def queries_of(qo_indptr: Tensor) -> int:
    """Queries of all requests, from offsets on the host, which begin at 0."""
    if int(qo_indptr[0]) != 0:
        raise ValueError(f"qo_indptr[0]={int(qo_indptr[0])}: expected 0")
    return int(qo_indptr[-1])


def check_values(qo_indptr: Tensor, kv_lens: Tensor) -> None:
    """Lengths on the host are not negative: what the planner itself says where it runs on the host."""
    bad = ((qo_indptr[1:] < qo_indptr[:-1]) | (kv_lens < 0)).nonzero()
    if bad.numel():
        raise _bad_lengths(int(bad[0]), qo_indptr, kv_lens)


def _bad_lengths(request: int, qo_indptr: Tensor, kv_lens: Tensor) -> ValueError:
    begin, end = int(qo_indptr[request]), int(qo_indptr[request + 1])
    if end < begin:
        return ValueError(f"qo_indptr[{request + 1}]={end}: expected at least qo_indptr[{request}]={begin}")
    return ValueError(f"kv_lens[{request}]={int(kv_lens[request])}: expected at least 0")


def _check_covers(block_mask: BlockMask, kv_lens: Tensor) -> None:
    most = int(kv_lens.max()) if kv_lens.numel() else 0
    if not block_mask.covers(most):
        raise ValueError(
            f"block_mask.kinds.shape={tuple(block_mask.kinds.shape)}: expected blocks of {block_mask.block_size} for "
            f"{most} positions"
        )


def longest(qo_indptr: Tensor) -> int:
    """Most queries of a request, from offsets int32 ``[num_requests + 1]`` on the host."""
    offsets = qo_indptr.contiguous()
    return int(host_module().attnloom_longest(offsets.data_ptr(), offsets.shape[0]))


def bound_of_longest(qo_indptr: Tensor, total_q: int, max_q: int | None) -> int:
    """The same of offsets on a device: what the caller knows, or 1 where there may be one for each request."""
    if max_q is not None:
        return check_positive("max_q", max_q)
    return 1 if total_q < qo_indptr.shape[0] else total_q


@dataclass(frozen=True, eq=False)
class Algorithm1Schedule:
    """What FlashInfer's Algorithm 1 makes of the same query tiles.

    Attributes:
        num_chunks: KV chunks it made.
        worker_tiles: int64 ``[num_workers]``, executed KV tiles.
        worker_cost: int64 ``[num_workers]``, in the units of the cost model.
    """

    num_chunks: int
    worker_tiles: Tensor
    worker_cost: Tensor

    @property
    def makespan(self) -> int:
        """Cost of the busiest worker."""
        return int(self.worker_cost.max())


def plan_algorithm1(plan: Plan) -> Algorithm1Schedule:
    """Schedule a plan's query tiles by Algorithm 1 of FlashInfer (arXiv 2501.01005): the yardstick, host only.

    It bounds the KV chunk, sorts the chunks, and gives the longest first to the least loaded worker.
    """
    tiles = torch.empty(plan.num_workers, dtype=torch.int64)
    cost = torch.empty(plan.num_workers, dtype=torch.int64)
    costs = plan.costs
    params = PlanParams(None, None, plan.buffer.data_ptr(), costs.item, costs.item_row, costs.kv_tile, costs.row)
    chunks = host_module().attnloom_plan_algorithm1(ctypes.byref(params), tiles.data_ptr(), cost.data_ptr())
    return Algorithm1Schedule(chunks, tiles, cost)
