"""The checks of what an engine is run with: each error names the argument, its value and what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnloom.core import launch
from attnloom.core.checks import check_aligned, check_contiguous_last, check_on_host, check_scale, check_tensor
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.streams import capturing

if TYPE_CHECKING:
    from attnloom.core.attention import Attention
    from attnloom.core.block_mask import BlockMask


def key_with(engine: Attention, block_mask: BlockMask | None) -> PlanKey:
    """The key of an engine's plans. A block mask stands for one variant's mask: with it they serve that one only."""
    return engine.plan_key if block_mask is None else engine.plan_key._replace(ranges=engine.spec.name)


def check_plan(engine: Attention, plan: Plan) -> None:
    """A plan is one of the engine's key."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    key = key_with(engine, plan.block_mask)
    if plan.key is key or plan.key == key:
        return
    if plan.key != key._replace(tile_q=key.tile_q_short):  # else a plan of short query tiles
        raise ValueError(f"plan.key={plan.key}: expected that of this engine, {key}")


def check_layout(plan: Plan) -> BlockSparseLayout:
    """The layout of a plan that has one."""
    if plan.layout is None:
        raise ValueError("plan.layout=None: expected a plan made with a layout")
    return plan.layout


def check_scales(engine: Attention, scales: tuple[object, object, object]) -> tuple[float, float, float]:
    """sm_scale, k_scale and v_scale as floats, with the defaults of :meth:`attnloom.Attention.run`."""
    sm_scale, k_scale, v_scale = scales
    return (
        engine.head_dim**-0.5 if sm_scale is None else check_scale("sm_scale", sm_scale),
        1.0 if k_scale is None else check_scale("k_scale", k_scale),
        1.0 if v_scale is None else check_scale("v_scale", v_scale),
    )


def check_tensors(
    engine: Attention,
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor | None,
    flags: tuple[bool, bool],
) -> int:
    """The tensors of a run fit the engine and the plan; returns the blocks that both caches have.

    Args:
        flags: return_lse, return_state.
        The others: as the engine got them.
    """
    layout = check_layout(plan)
    check_rows(engine, "q", q, engine.dtype, engine.head_dim, plan)
    num_blocks = min(_check_cache(engine, "k_cache", k_cache, layout), _check_cache(engine, "v_cache", v_cache, layout))
    return_lse, return_state = flags
    if return_lse and not engine.variant.use_softmax:
        raise ValueError(f"return_lse=True: expected False, {engine.variant.name} uses no softmax and has no LSE")
    if out is not None:
        check_rows(engine, "out", out, torch.float32 if return_state else engine.dtype, engine.head_dim_v, plan)
    return num_blocks


def check_run(
    engine: Attention,
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: tuple[object, object, object],
    out: Tensor | None,
    flags: tuple[bool, bool],
) -> None:
    """All checks of a run on a GPU that do not depend on values there, and those that do if asked for."""
    check_plan(engine, plan)
    num_blocks = check_tensors(engine, plan, q, k_cache, v_cache, out, flags)
    for name, scale in zip(("sm_scale", "k_scale", "v_scale"), scales, strict=True):
        check_on_host(name, scale)
    check_scales(engine, scales)
    if engine.validate and not capturing():
        launch.check_indices(check_layout(plan), num_blocks)


def check_rows(engine: Attention, name: str, rows: Tensor, dtype: torch.dtype, head_dim: int, plan: Plan) -> None:
    """q or out has a row for every query of the plan."""
    check_tensor(name, rows, dtype=dtype, ndim=3, device=engine.device)
    if rows.shape[0] < plan.total_q or rows.shape[1] != engine.num_qo_heads or rows.shape[2] != head_dim:
        raise ValueError(
            f"{name}.shape={tuple(rows.shape)}: expected [>= {plan.total_q}, {engine.num_qo_heads}, {head_dim}]"
        )
    check_contiguous_last(name, rows)


def _check_cache(engine: Attention, name: str, cache: Tensor, layout: BlockSparseLayout) -> int:
    """Returns the number of blocks."""
    check_tensor(name, cache, dtype=engine.kv_dtype, ndim=4, device=engine.device)
    if tuple(cache.shape[1:]) != (layout.block_size, engine.num_kv_heads, engine.head_dim):
        raise ValueError(
            f"{name}.shape={tuple(cache.shape)}: expected "
            f"[num_blocks, {layout.block_size}, {engine.num_kv_heads}, {engine.head_dim}]"
        )
    check_contiguous_last(name, cache)
    if not torch.compiler.is_compiling():
        check_aligned(name, cache)
    return cache.shape[0]
