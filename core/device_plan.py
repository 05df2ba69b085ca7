"""Plans of a CUDA engine: by the host planner and a copy, or by the device planner."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnloom.core.device_planner import new_buffer, plan_on_device
from attnloom.core.plan import Plan
from attnloom.core.plan_input import PlanInput
from attnloom.core.planner import HOST, check_values, plan_on_host, queries_of
from attnloom.core.streams import capturing, on


def plan_step(given: PlanInput, *, total_q: int | None, into: Plan | None, validate: bool) -> Plan:
    """The plan of a step, by who knows its lengths: the host where ``total_q`` is None, else the device.

    Args:
        given: lengths are on the host where ``total_q`` is None, else on the GPU.
        total_q: at least ``qo_indptr[-1]``.
        into: a plan to replace, in its buffer.
        validate: whether lengths on the device are looked at, which waits for it.
    """
    if total_q is None:
        return plan_from_host(given, into=into)
    if validate and not capturing():
        given.check(given.key.device)
        qo_indptr = given.qo_indptr.cpu()
        queries = queries_of(qo_indptr)
        check_values(qo_indptr, given.kv_lens.cpu())
        if queries > total_q:
            raise ValueError(f"total_q={total_q}: expected at least qo_indptr[-1]={queries}")
    return plan_on_device(given, total_q=total_q, into=into)


def plan_from_host(given: PlanInput, *, into: Plan | None = None) -> Plan:
    """A plan on the GPU from lengths on the host; nothing waits for the device.

    The host plans into page-locked memory of torch's allocator, which gives that memory out again only when the copy
    from it is done: a second plan may be made at once. Declared ranges and block masks lie on the device, so with
    them the lengths are copied and the device plans.

    Raises:
        ValueError: also while a CUDA graph is captured: a replay would copy from memory that holds something else then.
    """
    device = given.key.device
    with on(device):
        if capturing():
            raise ValueError(
                "qo_indptr.device=cpu: expected lengths on the device while a CUDA graph is captured: replays plan anew"
            )
        if given.ranges is not None or given.block_mask is not None:
            given.check(HOST)
            total_q = queries_of(given.qo_indptr)
            check_values(given.qo_indptr, given.kv_lens)
            words = given.qo_indptr.shape[0]
            staged = torch.empty(words + given.num_requests, dtype=torch.int32, pin_memory=True)
            torch.cat((given.qo_indptr, given.kv_lens), out=staged)
            lengths = staged.to(device, non_blocking=True)
            given = given._replace(qo_indptr=lengths[:words], kv_lens=lengths[words:])
            return plan_on_device(given, total_q=total_q, into=into)
        plan = plan_on_host(given, pinned=True, tile_capacity=None if into is None else into.tile_capacity)
        if into is None:
            buffer, _ = new_buffer(given, plan.tile_capacity)
        else:
            given.check_into(into, given.tiles_for(plan.total_q))
            buffer = into.buffer
        buffer.copy_(plan.buffer, non_blocking=True)
    return replace(plan, buffer=buffer)
