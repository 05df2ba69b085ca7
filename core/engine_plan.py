"""The plan that an engine makes of a step: by the host, or by the device where it knows the lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_tensor
from attnloom.core.device_plan import plan_step
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.params import Value
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.plan_input import DeclaredRange, PlanInput
from attnloom.core.planner import bound_of_longest, longest, plan_on_host
from attnloom.core.run_checks import key_with

if TYPE_CHECKING:
    from attnloom.core.attention import Attention


def plan_for(
    engine: Attention,
    qo_indptr: Tensor,
    layout: BlockSparseLayout,
    *,
    kv_lens: Tensor | None,
    num_workers: int | None,
    params: Mapping[str, Value] | None,
    block_mask: BlockMask | None,
    total_q: int | None,
    max_q: int | None,
    into: Plan | None,
) -> Plan:
    """See :meth:`attnloom.Attention.plan`."""
    lengths = _check_lengths(engine, qo_indptr, layout, kv_lens, total_q)
    if block_mask is not None and not engine.variant.logits_mask:
        raise ValueError(f"block_mask: expected None for {engine.variant.name}, which has no logits_mask to skip by it")
    key = key_with(engine, block_mask)
    on_gpu = engine.device.type == "cuda"
    if on_gpu and _fits_short_tiles(key, qo_indptr, total_q, max_q, into):
        key = key._replace(tile_q=key.tile_q_short)
    if num_workers is None:
        num_workers = engine.workers(key.tile_q)
    lockstep = math.gcd(engine.num_kv_heads, num_workers) if on_gpu else 1
    ranges = None
    if engine.variant.visible:
        values = engine.params.values(params, layout.num_rows)  # kept alive while a planner reads them
        ranges = DeclaredRange(engine.module, engine.params.pack(values))
    given = PlanInput(qo_indptr, lengths, key, num_workers, engine.tiles.costs, lockstep, layout, ranges, block_mask)
    if on_gpu:
        return plan_step(given, total_q=total_q, into=into, validate=engine.validate)
    plan = plan_on_host(given, tile_capacity=None if into is None else into.tile_capacity)
    if into is None:
        return plan
    given.check_into(into, plan.tile_capacity)
    return replace(plan, buffer=into.buffer.copy_(plan.buffer))


def _check_lengths(
    engine: Attention, qo_indptr: Tensor, layout: BlockSparseLayout, kv_lens: Tensor | None, total_q: int | None
) -> Tensor:
    """The lengths to plan for; they lie where ``qo_indptr`` does."""
    if not isinstance(layout, BlockSparseLayout):
        raise TypeError(f"layout: expected a BlockSparseLayout, got {type(layout).__name__}")
    if layout.device != engine.device:
        raise ValueError(f"layout.device={layout.device}: expected {engine.device}")
    check_tensor("qo_indptr", qo_indptr, dtype=torch.int32, ndim=1)
    on_device = qo_indptr.device.type != "cpu"
    lengths = layout.lengths
    if kv_lens is not None:
        lengths = check_tensor("kv_lens", kv_lens, dtype=torch.int32, ndim=1)
    elif not on_device and engine.device.type != "cpu":
        raise ValueError(
            f"kv_lens=None: expected lengths on the host, as qo_indptr, since layout.lengths is on {engine.device}"
        )
    if lengths.shape != layout.lengths.shape:
        raise ValueError(
            f"kv_lens.shape={tuple(lengths.shape)}: expected one per row of layout, {tuple(layout.lengths.shape)}"
        )
    if on_device != (total_q is not None):
        raise ValueError(
            f"total_q={total_q}: expected a bound of qo_indptr[-1] where qo_indptr is on a GPU, else None; "
            f"qo_indptr.device={qo_indptr.device}"
        )
    return lengths


def _fits_short_tiles(
    key: PlanKey, qo_indptr: Tensor, total_q: int | None, max_q: int | None, into: Plan | None
) -> bool:
    """Whether every request fits into a short query tile, as far as the host knows."""
    if isinstance(into, Plan):
        return into.key.tile_q == key.tile_q_short  # a captured graph launches the same kernel again
    most = longest(qo_indptr) if total_q is None else bound_of_longest(qo_indptr, total_q, max_q)
    return most * key.num_qo_heads <= key.tile_q_short * key.num_kv_heads
