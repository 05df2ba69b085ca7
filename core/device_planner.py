"""The device planner: a plan made on a GPU from lengths that lie there, inside a CUDA graph if need be.

csrc/planner/device.h runs the functions of csrc/planner/scan.h in one CTA; what comes out is the host's plan, word for
word. Nothing is read back.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.abi import BlockMaskTensor, PlanParams
from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_positive, check_tensor
from attnloom.core.device_module import device_module
from attnloom.core.errors import AttnloomError
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.planner import capacity_for, check_workers, header_of, words_for
from attnloom.core.streams import on, stream_of
from attnloom.core.tiles import Costs


@dataclass(frozen=True, eq=False)
class DeviceRange:
    """A variant's visible range, compiled for a GPU.

    Attributes:
        module: an attention module that exports a planner with that range.
        words: the variant's parameters, packed; what they point to must outlive the plan's last run.
    """

    module: ctypes.CDLL
    words: ctypes.Array[ctypes.c_uint64]


def new_buffer(num_requests: int, tile_capacity: int, num_stretches: int, device: torch.device) -> tuple[Tensor, int]:
    """A plan's buffer on a GPU, and the address of the planner's scratch behind it.

    One allocation, which lives as long as the buffer: the prefix sum of every tile's cost, 64 bits each.
    """
    words = words_for(num_requests, tile_capacity, num_stretches)
    pairs = (words + 1) // 2
    room = torch.empty(pairs + tile_capacity + 1, dtype=torch.int64, device=device)
    return room.view(torch.int32)[:words], room.data_ptr() + 8 * pairs


def scratch_of(plan: Plan) -> int:
    """Address of the scratch behind the buffer of a plan that lies on a GPU."""
    return plan.buffer.data_ptr() + (plan.buffer.shape[0] + 1) // 2 * 8


def plan_on_device(
    qo_indptr: Tensor,
    kv_lens: Tensor,
    key: PlanKey,
    *,
    total_q: int,
    num_workers: int,
    lockstep: int,
    costs: Costs,
    layout: BlockSparseLayout,
    ranges: DeviceRange | None = None,
    block_mask: BlockMask | None = None,
    into: Plan | None = None,
) -> Plan:
    """Put the planner on the current stream; see :func:`attnloom.core.planner.plan_scan` for the rest.

    Args:
        qo_indptr: int32 ``[num_requests + 1]`` on the GPU, contiguous. Read when the stream gets there, and again at
            each replay of a graph.
        kv_lens: int32 ``[num_requests]``, likewise.
        total_q: at least ``qo_indptr[-1]``. A plan of more queries than it allows for computes nothing.
        into: a plan to replace, in its buffer.

    Raises:
        TypeError, ValueError: arguments of another type, shape or device. Values are not looked at.
    """
    device = key.device
    check_tensor("qo_indptr", qo_indptr, dtype=torch.int32, ndim=1, device=device)
    check_tensor("kv_lens", kv_lens, dtype=torch.int32, ndim=1, device=device)
    num_requests = kv_lens.shape[0]
    if qo_indptr.shape[0] != num_requests + 1:
        raise ValueError(
            f"qo_indptr.shape={tuple(qo_indptr.shape)}: expected {num_requests + 1} entries, one more than requests"
        )
    for name, tensor in (("qo_indptr", qo_indptr), ("kv_lens", kv_lens)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.stride()={tensor.stride()}: expected a contiguous tensor")
    if total_q != 0:
        check_positive("total_q", total_q)
    check_workers(key, num_workers, lockstep)
    trimmed = layout.positions is None
    if block_mask is not None:
        _check_block_mask(block_mask, key, num_requests, trimmed)
    capacity = capacity_for(key, num_requests, total_q)
    if into is None:
        buffer, scratch = new_buffer(num_requests, capacity, num_workers // lockstep, device)
    else:
        check_same_room(into, key, num_requests, capacity, num_workers, lockstep)
        buffer, scratch, capacity = into.buffer, scratch_of(into), into.tile_capacity
    header = header_of(key, num_requests, num_workers, lockstep, trimmed, capacity)
    params = PlanParams(
        qo_indptr.data_ptr(),
        kv_lens.data_ptr(),
        buffer.data_ptr(),
        costs.item,
        costs.kv_tile,
        costs.row,
        None,
        None if ranges is None else ctypes.addressof(ranges.words),
        BlockMaskTensor() if block_mask is None else block_mask.struct(),
        scratch,
        stream_of(device),
    )
    module = device_module(device) if ranges is None else ranges.module
    with on(device):
        error = module.attnloom_plan_scan_device(ctypes.byref(params), ctypes.byref(header))
    if error:
        raise AttnloomError(f"the device planner was not launched: CUDA error {error}")
    return Plan(key, num_requests, -1, num_workers, lockstep, total_q, capacity, costs, buffer, layout, block_mask)


def check_same_room(
    into: Plan, key: PlanKey, num_requests: int, tile_capacity: int, num_workers: int, lockstep: int
) -> None:
    """A new plan fits into the buffer of an old one, array for array."""
    found = (into.key, into.num_requests, into.num_workers, into.lockstep)
    if found != (key, num_requests, num_workers, lockstep):
        raise ValueError(
            f"into: expected a plan of {num_requests} requests for {num_workers} workers in lockstep {lockstep} with "
            f"key {key}, got {into.num_requests}, {into.num_workers}, {into.lockstep}, {into.key}"
        )
    if into.tile_capacity < tile_capacity:
        raise ValueError(f"into.tile_capacity={into.tile_capacity}: expected at least {tile_capacity}, as queries need")


def _check_block_mask(block_mask: BlockMask, key: PlanKey, num_requests: int, trimmed: bool) -> None:
    """What can be said without lengths; that the mask covers them is the caller's to know."""
    if not trimmed:
        raise ValueError("block_mask: expected None for a layout with positions, whose slots lie anywhere")
    check_tensor("block_mask.kinds", block_mask.kinds, device=key.device)
    if block_mask.block_size != key.tile_kv:
        raise ValueError(f"block_mask.block_size={block_mask.block_size}: expected the KV tile, {key.tile_kv}")
    requests = block_mask.kinds.shape[0]
    if requests not in (1, num_requests):
        raise ValueError(f"block_mask.kinds.shape[0]={requests}: expected 1 or {num_requests}, one per request")
