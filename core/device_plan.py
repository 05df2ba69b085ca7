"""Plans of a CUDA engine: by the host planner and a copy, or by the device planner."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_tensor
from attnloom.core.device_planner import DeviceRange, check_same_room, new_buffer, plan_on_device
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.planner import capacity_for, check_lengths, plan_scan
from attnloom.core.streams import capturing, on
from attnloom.core.tiles import Costs

_HOST = torch.device("cpu")


def plan_step(
    qo_indptr: Tensor,
    kv_lens: Tensor,
    key: PlanKey,
    *,
    total_q: int | None,
    num_workers: int,
    lockstep: int,
    costs: Costs,
    layout: BlockSparseLayout,
    ranges: DeviceRange | None,
    block_mask: BlockMask | None,
    into: Plan | None,
    validate: bool,
) -> Plan:
    """The plan of a step, by who knows its lengths: the host where ``total_q`` is None, else the device.

    Args:
        validate: whether lengths on the device are looked at, which waits for it.
        Others: see :func:`plan_from_host` and :func:`attnloom.core.device_planner.plan_on_device`.
    """
    if total_q is None:
        return plan_from_host(
            qo_indptr,
            kv_lens,
            key,
            num_workers=num_workers,
            lockstep=lockstep,
            costs=costs,
            layout=layout,
            ranges=ranges,
            block_mask=block_mask,
            into=into,
        )
    if validate and not capturing():
        check_tensor("qo_indptr", qo_indptr, dtype=torch.int32, ndim=1)
        queries = check_lengths(qo_indptr.cpu(), kv_lens.shape[0])
        check_values(qo_indptr.cpu(), kv_lens.cpu())
        if queries > total_q:
            raise ValueError(f"total_q={total_q}: expected at least qo_indptr[-1]={queries}")
    return plan_on_device(
        qo_indptr,
        kv_lens,
        key,
        total_q=total_q,
        num_workers=num_workers,
        lockstep=lockstep,
        costs=costs,
        layout=layout,
        ranges=ranges,
        block_mask=block_mask,
        into=into,
    )


def plan_from_host(
    qo_indptr: Tensor,
    kv_lens: Tensor,
    key: PlanKey,
    *,
    num_workers: int,
    lockstep: int,
    costs: Costs,
    layout: BlockSparseLayout,
    ranges: DeviceRange | None = None,
    block_mask: BlockMask | None = None,
    into: Plan | None = None,
) -> Plan:
    """A plan on the GPU from lengths on the host; nothing waits for the device.

    The host plans into page-locked memory of torch's allocator, which gives that memory out again only when the copy
    from it is done: a second plan may be made at once. Declared ranges and block masks lie on the device, so with
    them the lengths are copied and the device plans.

    Args: see :func:`attnloom.core.planner.plan_scan` and :func:`attnloom.core.device_planner.plan_on_device`.

    Raises:
        ValueError: also while a CUDA graph is captured: a replay would copy from memory that holds something else then.
    """
    device = key.device
    with on(device):
        if capturing():
            raise ValueError(
                "qo_indptr.device=cpu: expected lengths on the device while a CUDA graph is captured: replays plan anew"
            )
        if ranges is not None or block_mask is not None:
            check_tensor("qo_indptr", qo_indptr, dtype=torch.int32, ndim=1, device=_HOST)
            check_tensor("kv_lens", kv_lens, dtype=torch.int32, ndim=1, device=_HOST)
            total_q = check_lengths(qo_indptr, kv_lens.shape[0])
            check_values(qo_indptr, kv_lens)
            words = qo_indptr.shape[0]
            staged = torch.empty(words + kv_lens.shape[0], dtype=torch.int32, pin_memory=True)
            torch.cat((qo_indptr, kv_lens), out=staged)
            lengths = staged.to(device, non_blocking=True)
            return plan_on_device(
                lengths[:words],
                lengths[words:],
                key,
                total_q=total_q,
                num_workers=num_workers,
                lockstep=lockstep,
                costs=costs,
                layout=layout,
                ranges=ranges,
                block_mask=block_mask,
                into=into,
            )
        plan = plan_scan(
            qo_indptr,
            kv_lens,
            key,
            num_workers=num_workers,
            lockstep=lockstep,
            costs=costs,
            layout=layout,
            pinned=True,
            tile_capacity=None if into is None else into.tile_capacity,
        )
        if into is None:
            buffer, _ = new_buffer(plan.num_requests, plan.tile_capacity, num_workers // lockstep, device)
        else:
            needed = capacity_for(key, plan.num_requests, plan.total_q)
            check_same_room(into, key, plan.num_requests, needed, num_workers, lockstep)
            buffer = into.buffer
        buffer.copy_(plan.buffer, non_blocking=True)
    return replace(plan, buffer=buffer)


def check_values(qo_indptr: Tensor, kv_lens: Tensor) -> None:
    """Lengths on the host are not negative, as the host planner checks."""
    shrinks = (qo_indptr[1:] < qo_indptr[:-1]).nonzero()
    if shrinks.numel():
        request = int(shrinks[0])
        raise ValueError(
            f"qo_indptr[{request + 1}]={int(qo_indptr[request + 1])}: expected at least "
            f"qo_indptr[{request}]={int(qo_indptr[request])}"
        )
    negative = (kv_lens < 0).nonzero()
    if negative.numel():
        raise ValueError(f"kv_lens[{int(negative[0])}]={int(kv_lens[int(negative[0])])}: expected at least 0")
