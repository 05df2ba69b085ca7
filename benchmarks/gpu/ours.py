"""attnloom through its public interface."""

from __future__ import annotations

import functools

import torch

from attnloom import Attention, BlockSparseLayout, variants
from gpu.case import Case, Runner


@functools.cache
def engine(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    window: int | None,
    device: torch.device,
    batch_invariant: bool = False,
) -> Attention:
    """One for every row of the same shape, as a model's layers share theirs."""
    variant = variants.Causal() if window is None else variants.SlidingWindow(window)
    return Attention(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        variant=variant,
        device=device,
        batch_invariant=batch_invariant,
    )


def ours(case: Case, batch_invariant: bool = False) -> Runner:
    """Planned on the host, outside of what is timed (planner.py measures plans)."""
    shape = case.shape
    attention = engine(
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        case.k.dtype,
        shape.window,
        case.q.device,
        batch_invariant,
    )
    layout = BlockSparseLayout.from_page_table(case.table, case.lengths, shape.page_size)
    plan = attention.plan(case.qo_indptr, layout, kv_lens=case.kv_lens)
    out = torch.empty_like(case.q)
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale} if shape.fp8_kv else {}
    return Runner(lambda: attention.run(plan, case.q, case.k, case.v, out=out, **scales), out)
