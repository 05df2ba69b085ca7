"""The device planner: a plan made on a GPU from lengths that lie there, inside a CUDA graph if need be.

csrc/planner/device.h runs the functions of csrc/planner/scan.h in one CTA; what comes out is the host's plan, word for
word. Nothing is read back.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from attnloom.core.checks import check_positive, check_tensor
from attnloom.core.device_module import device_module
from attnloom.core.errors import AttnloomError
from attnloom.core.plan import Plan
from attnloom.core.plan_input import PlanInput
from attnloom.core.streams import on, stream_of


def plan_on_device(given: PlanInput, *, total_q: int, into: Plan | None = None) -> Plan:
    """Put the planner on the current stream.

    Args:
        given: lengths are on the GPU, contiguous. They are read when the stream gets there, and again at each replay of
            a graph. That a block mask covers them is the caller's to know.
        total_q: at least ``qo_indptr[-1]``. A plan of more queries than it allows for computes nothing.
        into: a plan to replace, in its buffer.

    Raises:
        TypeError, ValueError: something of another type, shape or device. Values are not looked at.
    """
    device = given.key.device
    given.check(device)
    for name, tensor in (("qo_indptr", given.qo_indptr), ("kv_lens", given.kv_lens)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.stride()={tensor.stride()}: expected a contiguous tensor")
    if given.block_mask is not None:
        check_tensor("block_mask.kinds", given.block_mask.kinds, device=device)
    if total_q != 0:
        check_positive("total_q", total_q)
    capacity = given.tiles_for(total_q)
    if into is None:
        buffer, scratch = new_buffer(given, capacity)
    else:
        given.check_into(into, capacity)
        buffer, scratch, capacity = into.buffer, scratch_of(into), into.tile_capacity
    header = given.header(capacity)
    params = given.params(buffer, scratch=scratch, stream=stream_of(device))
    module = device_module(device) if given.ranges is None else given.ranges.module
    with on(device):
        error = module.attnloom_plan_scan_device(ctypes.byref(params), ctypes.byref(header))
    if error:
        raise AttnloomError(f"the device planner was not launched: CUDA error {error}")
    return given.plan(buffer, num_tiles=-1, total_q=total_q, tile_capacity=capacity)


def new_buffer(given: PlanInput, tile_capacity: int) -> tuple[Tensor, int]:
    """A plan's buffer on its GPU, and the address of the planner's scratch behind it.

    One allocation, which lives as long as the buffer: the prefix sum of every tile's cost, 64 bits each.
    """
    words = given.words_for(tile_capacity)
    pairs = (words + 1) // 2
    room = torch.empty(pairs + tile_capacity + 1, dtype=torch.int64, device=given.key.device)
    return room.view(torch.int32)[:words], room.data_ptr() + 8 * pairs


def scratch_of(plan: Plan) -> int:
    """Address of the scratch behind the buffer of a plan that lies on a GPU."""
    return plan.buffer.data_ptr() + (plan.buffer.shape[0] + 1) // 2 * 8
