"""The host planner: lengths to a plan, by the scan of csrc/planner/scan.h; Algorithm 1 is the yardstick beside it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.abi import PLAN_HEADER_WORDS, PlanHeader, PlanParams
from attnloom.core.checks import check_positive, check_tensor
from attnloom.core.host import host_module
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.tiles import Costs


def plan_scan(
    qo_indptr: Tensor,
    kv_lens: Tensor,
    key: PlanKey,
    *,
    num_workers: int,
    costs: Costs,
    layout: BlockSparseLayout | None = None,
) -> Plan:
    """Plan a step: integer costs, a prefix sum, and an equal contiguous stretch for each worker.

    Stream-K (arXiv 2301.03598) over the items of attention. Deterministic; linear in requests.

    Args:
        qo_indptr: int32 ``[num_requests + 1]`` on the host, from 0: request r has queries
            ``qo_indptr[r] : qo_indptr[r + 1]``.
        kv_lens: int32 ``[num_requests]`` on the host, KV tokens; may be upper bounds of the true lengths.
        key: heads, tiles, band and device.
        num_workers: workers to balance over, at least 1.
        costs: of an item.
        layout: where the KV lies. With logical positions the band trims nothing: slots are not at their own positions.

    Raises:
        TypeError, ValueError: arguments of another type, shape or order; the message names the value.
    """
    check_tensor("qo_indptr", qo_indptr, dtype=torch.int32, ndim=1, device=_HOST)
    check_tensor("kv_lens", kv_lens, dtype=torch.int32, ndim=1, device=_HOST)
    num_requests = kv_lens.shape[0]
    if qo_indptr.shape[0] != num_requests + 1:
        raise ValueError(
            f"qo_indptr.shape={tuple(qo_indptr.shape)}: expected {num_requests + 1} entries, one more than requests"
        )
    qo_indptr = qo_indptr.contiguous()
    kv_lens = kv_lens.contiguous()
    total_q = int(qo_indptr[-1])
    if int(qo_indptr[0]) != 0:
        raise ValueError(f"qo_indptr[0]={int(qo_indptr[0])}: expected 0")
    check_positive("num_workers", num_workers)
    group = key.num_qo_heads // key.num_kv_heads
    capacity = num_requests + max(total_q, 0) * group // key.tile_q
    words = PLAN_HEADER_WORDS + num_requests + 1 + 4 * capacity + 5 * num_workers + 3
    buffer = torch.empty(words, dtype=torch.int32)
    header = PlanHeader(
        num_requests,
        0,
        num_workers,
        key.num_qo_heads,
        key.num_kv_heads,
        key.tile_q_short,
        key.tile_q,
        key.tile_kv,
        -1 if key.left is None else key.left,
        -1 if key.right is None else key.right,
        0 if layout is not None and layout.positions is not None else 1,
        capacity,
    )
    params = PlanParams(
        qo_indptr.data_ptr(), kv_lens.data_ptr(), buffer.data_ptr(), costs.item, costs.kv_tile, costs.row
    )
    num_tiles = host_module().attnloom_plan_scan(ctypes.byref(params), ctypes.byref(header))
    if num_tiles < 0:
        _raise_bad_lengths(-1 - num_tiles, qo_indptr, kv_lens)
    return Plan(key, num_requests, num_tiles, num_workers, total_q, capacity, costs, buffer, layout)


_HOST = torch.device("cpu")


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
