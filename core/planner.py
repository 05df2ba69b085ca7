"""The host planner: lengths to a plan, by the scan of csrc/planner/scan.h; Algorithm 1 is the yardstick beside it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.abi import PLAN_HEADER_WORDS, BlockMaskTensor, PlanHeader, PlanParams
from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_positive, check_tensor
from attnloom.core.host import host_module
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.settings import MOST_WORKERS
from attnloom.core.tiles import Costs


@dataclass(frozen=True, eq=False)
class DeclaredRange:
    """A variant's visible range, compiled.

    Attributes:
        function: address of the module's ``attnloom_visible``.
        words: the variant's parameters, packed; what they point to must outlive the planning.
    """

    function: int
    words: ctypes.Array[ctypes.c_uint64]


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
        qo_indptr: int32 ``[num_requests + 1]`` on the host, from 0: request r has queries
            ``qo_indptr[r] : qo_indptr[r + 1]``.
        kv_lens: int32 ``[num_requests]`` on the host, KV tokens; may be upper bounds of the true lengths.
        key: heads, tiles, band and device.
        num_workers: workers to balance over, at least 1.
        lockstep: workers that run the same stretch on neighbouring kv heads, a divisor of num_workers and of the kv
            heads: they read the same pages at the same time.
        costs: of an item.
        ranges: the variant's visible range; None: the band alone.
        block_mask: KV tiles that need not be computed.
        layout: where the KV lies. With logical positions the band trims nothing: slots are not at their own positions.
        pinned: whether the buffer is page-locked, for a copy to a GPU.
        tile_capacity: room for query tiles; None: what these lengths may need.

    Raises:
        TypeError, ValueError: arguments of another type, shape or order; the message names the value.
    """
    check_tensor("qo_indptr", qo_indptr, dtype=torch.int32, ndim=1, device=_HOST)
    check_tensor("kv_lens", kv_lens, dtype=torch.int32, ndim=1, device=_HOST)
    num_requests = kv_lens.shape[0]
    total_q = check_lengths(qo_indptr, num_requests)
    qo_indptr = qo_indptr.contiguous()
    kv_lens = kv_lens.contiguous()
    check_workers(key, num_workers, lockstep)
    trimmed = layout is None or layout.positions is None
    if block_mask is not None:
        _check_block_mask(block_mask, key, kv_lens, trimmed)
    capacity = capacity_for(key, num_requests, total_q)
    if tile_capacity is not None:
        if capacity > tile_capacity:
            raise ValueError(f"qo_indptr[-1]={total_q}: expected query tiles for {tile_capacity}, may need {capacity}")
        capacity = tile_capacity
    words = words_for(num_requests, capacity, num_workers // lockstep)
    buffer = torch.empty(words, dtype=torch.int32, pin_memory=pinned)
    header = header_of(key, num_requests, num_workers, lockstep, trimmed, capacity)
    params = PlanParams(
        qo_indptr.data_ptr(),
        kv_lens.data_ptr(),
        buffer.data_ptr(),
        costs.item,
        costs.kv_tile,
        costs.row,
        None if ranges is None else ranges.function,
        None if ranges is None else ctypes.addressof(ranges.words),
        BlockMaskTensor() if block_mask is None else block_mask.struct(),
    )
    num_tiles = host_module().attnloom_plan_scan(ctypes.byref(params), ctypes.byref(header))
    if num_tiles < 0:
        _raise_bad_lengths(-1 - num_tiles, qo_indptr, kv_lens)
    return Plan(
        key, num_requests, num_tiles, num_workers, lockstep, total_q, capacity, costs, buffer, layout, block_mask
    )


_HOST = torch.device("cpu")


def check_lengths(qo_indptr: Tensor, num_requests: int) -> int:
    """Offsets on the host begin at 0 and are one more than requests; returns the queries."""
    if qo_indptr.shape[0] != num_requests + 1:
        raise ValueError(
            f"qo_indptr.shape={tuple(qo_indptr.shape)}: expected {num_requests + 1} entries, one more than requests"
        )
    if int(qo_indptr[0]) != 0:
        raise ValueError(f"qo_indptr[0]={int(qo_indptr[0])}: expected 0")
    return int(qo_indptr[-1])


def longest(qo_indptr: Tensor) -> int:
    """Most queries of a request, from offsets int32 ``[num_requests + 1]`` on the host."""
    offsets = qo_indptr.contiguous()
    return int(host_module().attnloom_longest(offsets.data_ptr(), offsets.shape[0]))


def bound_of_longest(qo_indptr: Tensor, total_q: int, max_q: int | None) -> int:
    """The same of offsets on a device: what the caller knows, or 1 where there may be one for each request."""
    if max_q is not None:
        return check_positive("max_q", max_q)
    return 1 if total_q < qo_indptr.shape[0] else total_q


def check_workers(key: PlanKey, num_workers: int, lockstep: int) -> None:
    """Workers can be shared out in groups of ``lockstep``."""
    if check_positive("num_workers", num_workers) > MOST_WORKERS:
        raise ValueError(f"num_workers={num_workers}: expected at most {MOST_WORKERS}")
    if lockstep < 1 or num_workers % lockstep or key.num_kv_heads % lockstep:
        raise ValueError(
            f"lockstep={lockstep}: expected a divisor of num_workers={num_workers} and num_kv_heads={key.num_kv_heads}"
        )


def capacity_for(key: PlanKey, num_requests: int, total_q: int) -> int:
    """Query tiles that this many requests with this many queries in all have at most."""
    return num_requests + max(total_q, 0) * (key.num_qo_heads // key.num_kv_heads) // key.tile_q


def words_for(num_requests: int, tile_capacity: int, num_stretches: int) -> int:
    """Words of a plan's buffer: plan_words() of csrc/planner/plan.h."""
    return PLAN_HEADER_WORDS + num_requests + 1 + 4 * tile_capacity + 5 * num_stretches + 3


def header_of(
    key: PlanKey, num_requests: int, num_workers: int, lockstep: int, trimmed: bool, tile_capacity: int
) -> PlanHeader:
    """The header of a plan, as the planner takes it."""
    return PlanHeader(
        num_requests,
        0,
        num_workers,
        lockstep,
        key.num_qo_heads,
        key.num_kv_heads,
        key.tile_q_short,
        key.tile_q,
        key.tile_kv,
        -1 if key.left is None else key.left,
        -1 if key.right is None else key.right,
        trimmed,
        tile_capacity,
        key.chunk,
        1,
    )


def _check_block_mask(block_mask: BlockMask, key: PlanKey, kv_lens: Tensor, trimmed: bool) -> None:
    if not trimmed:
        raise ValueError("block_mask: expected None for a layout with positions, whose slots lie anywhere")
    if block_mask.block_size != key.tile_kv:
        raise ValueError(f"block_mask.block_size={block_mask.block_size}: expected the KV tile, {key.tile_kv}")
    requests = block_mask.kinds.shape[0]
    if requests not in (1, kv_lens.shape[0]):
        raise ValueError(f"block_mask.kinds.shape[0]={requests}: expected 1 or {kv_lens.shape[0]}, one per request")
    longest = int(kv_lens.max()) if kv_lens.numel() else 0
    if not block_mask.covers(longest):
        raise ValueError(
            f"block_mask.kinds.shape={tuple(block_mask.kinds.shape)}: expected blocks of {key.tile_kv} for "
            f"{longest} positions"
        )


def _raise_bad_lengths(request: int, qo_indptr: Tensor, kv_lens: Tensor) -> None:
    begin, end = int(qo_indptr[request]), int(qo_indptr[request + 1])
    if end < begin:
        raise ValueError(f"qo_indptr[{request + 1}]={end}: expected at least qo_indptr[{request}]={begin}")
    raise ValueError(f"kv_lens[{request}]={int(kv_lens[request])}: expected at least 0")


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
    params = PlanParams(None, None, plan.buffer.data_ptr(), plan.costs.item, plan.costs.kv_tile, plan.costs.row)
    chunks = host_module().attnloom_plan_algorithm1(ctypes.byref(params), tiles.data_ptr(), cost.data_ptr())
    return Algorithm1Schedule(chunks, tiles, cost)
