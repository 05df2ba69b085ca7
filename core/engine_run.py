"""Running an engine: arguments to a launch, outputs to the caller.

On a GPU, called eagerly, a layer costs the host a few microseconds: :func:`run_direct`. On a CPU and under
torch.compile every argument is checked: :func:`run_checked`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnloom.core import launch
from attnloom.core.checks import check_tensor
from attnloom.core.direct import DirectPath
from attnloom.core.op import op_arguments
from attnloom.core.params import Value, pack
from attnloom.core.plan import Plan
from attnloom.core.run_checks import check_layout, check_plan, check_rows, check_run, check_scales, check_tensors
from attnloom.core.templates import NO_HOOKS

if TYPE_CHECKING:
    from attnloom.core.attention import Attention

Scales = tuple[object, object, object]
"""sm_scale, k_scale, v_scale as the caller gave them."""

Flags = tuple[bool, bool]
"""return_lse, return_state."""

Result = Tensor | tuple[Tensor, Tensor | None]
"""out, (out, lse) or (state, lse): what :meth:`attnloom.Attention.run` returns."""


def run_direct(
    engine: Attention,
    direct: DirectPath,
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: Scales,
    params: Mapping[str, Value] | None,
    out: Tensor | None,
    flags: Flags,
) -> Result:
    """:meth:`attnloom.Attention.run` on a GPU: arguments that were checked before are not checked again."""
    check_plan(engine, plan)
    if engine.validate:
        check_run(engine, plan, q, k_cache, v_cache, scales, out, flags)
    return_lse, return_state = flags
    hooks = NO_HOOKS
    if params is not None or engine.variant.params:
        words = engine.params.words(params, plan.num_requests)
        hooks = ctypes.addressof(words)
    if out is None:
        check_tensor("q", q)
        dtype = torch.float32 if return_state else engine.dtype
        out = q.new_empty((plan.total_q, engine.num_qo_heads, engine.head_dim_v), dtype=dtype)
    lse = None
    if (return_lse or return_state) and engine.variant.use_softmax:
        lse = out.new_empty((plan.total_q, engine.num_qo_heads), dtype=torch.float32)
    direct.run(engine, plan, q, k_cache, v_cache, scales, flags, out, lse, hooks)
    if return_state:
        return out, lse
    return out if lse is None else (out, lse)


def run_checked(
    engine: Attention,
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: Scales,
    params: Mapping[str, Value] | None,
    out: Tensor | None,
    flags: Flags,
) -> Result:
    """:meth:`attnloom.Attention.run` on a CPU, and on any device under torch.compile."""
    check_plan(engine, plan)
    num_blocks = check_tensors(engine, plan, q, k_cache, v_cache, out, flags)
    values = engine.params.values(params, plan.num_requests)
    return_lse, return_state = flags
    if out is None:
        dtype = torch.float32 if return_state else engine.dtype
        out = q.new_empty((plan.total_q, engine.num_qo_heads, engine.head_dim_v), dtype=dtype)
    lse = None
    if (return_lse or return_state) and engine.variant.use_softmax:
        lse = q.new_empty((plan.total_q, engine.num_qo_heads), dtype=torch.float32)
    layout, tensors = check_layout(plan), (q, k_cache, v_cache, out, lse)
    factors = check_scales(engine, scales)
    if torch.compiler.is_compiling():
        arguments = op_arguments(engine, plan, layout, tensors, values, factors, return_state)
        torch.ops.attnloom.attention.default(*arguments)
    else:
        if num_blocks not in plan.checked_blocks:
            launch.check_indices(layout, num_blocks)
            plan.checked_blocks.add(num_blocks)
        words = pack(engine.variant.params, values)
        launch.run(
            engine, plan.buffer, plan.num_workers, layout, plan.block_mask, tensors, words, factors, return_state
        )
    if return_state:
        return out, lse
    return out if lse is None else (out, lse)


def finish(
    engine: Attention,
    plan: Plan,
    out_state: Tensor,
    lse_state: Tensor | None,
    params: Mapping[str, Value] | None,
    out: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`attnloom.finish_state`."""
    check_plan(engine, plan)
    layout = check_layout(plan)
    shape = (plan.total_q, engine.num_qo_heads, engine.head_dim_v)
    check_tensor("out_state", out_state, dtype=torch.float32, ndim=3, device=engine.device)
    if tuple(out_state.shape) != shape:
        raise ValueError(f"out_state.shape={tuple(out_state.shape)}: expected {shape}")
    if engine.variant.use_softmax:
        check_tensor("lse_state", lse_state, dtype=torch.float32, ndim=2, device=engine.device)
        assert lse_state is not None
        if tuple(lse_state.shape) != shape[:2]:
            raise ValueError(f"lse_state.shape={tuple(lse_state.shape)}: expected {shape[:2]}")
        lse_state = lse_state.contiguous()
    elif lse_state is not None or return_lse:
        raise ValueError(f"lse_state, return_lse: expected none, {engine.variant.name} uses no softmax and has no LSE")
    values = engine.params.values(params, plan.num_requests)
    if out is None:
        out = out_state.new_empty(shape, dtype=engine.dtype)
    else:
        check_rows(engine, "out", out, engine.dtype, engine.head_dim_v, plan)
    lse = out_state.new_empty(shape[:2]) if return_lse else None
    words = engine.params.pack(values)
    launch.finish(engine, plan.buffer, layout, (out_state.contiguous(), lse_state), out, lse, words)
    return out if lse is None else (out, lse)
