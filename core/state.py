"""States: (O, LSE) of queries over part of their KV, and the operator that merges them.

Attention over a union of disjoint KV sets is the LSE-weighted mean of the parts (arXiv 2501.01005, section 2.2); KV
splits, compositions and context-parallel ranks are merged by it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnloom.core.abi import MergeParams
from attnloom.core.checks import check_tensor
from attnloom.core.errors import AttnloomError
from attnloom.core.modules import module_for
from attnloom.core.params import Value
from attnloom.core.streams import on, stream_of

if TYPE_CHECKING:
    from attnloom.core.attention import Attention
    from attnloom.core.plan import Plan


def merge_states(outs: Tensor, lses: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Merge the states of the same queries over disjoint parts of their KV, in the order given.

    Args:
        outs: float32 ``[num_states, total_q, num_heads, head_dim_v]``, on a CPU or a GPU.
        lses: float32 ``[num_states, total_q, num_heads]``, natural logarithm, -inf for a part without a visible key;
            None for states of a variant without softmax, which add.

    Returns:
        out float32 ``[total_q, num_heads, head_dim_v]``, lse float32 ``[total_q, num_heads]`` (None without softmax).
        Where every part is empty, out is 0 and lse is -inf.
    """
    check_tensor("outs", outs, dtype=torch.float32, ndim=4)
    outs = outs.contiguous()
    out = torch.empty_like(outs[0]) if outs.shape[0] else outs.new_zeros(outs.shape[1:])
    lse = None
    if lses is not None:
        check_tensor("lses", lses, dtype=torch.float32, ndim=3, device=outs.device)
        if lses.shape != outs.shape[:3]:
            raise ValueError(f"lses.shape={tuple(lses.shape)}: expected {tuple(outs.shape[:3])}, as outs")
        lses = lses.contiguous()
        lse = lses.new_empty(lses.shape[1:])
    params = MergeParams(
        outs.data_ptr(),
        None if lses is None else lses.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        outs.shape[0],
        outs.shape[1] * outs.shape[2],
        outs.shape[3],
        torch.get_num_threads(),
        stream_of(outs.device),
    )
    module = module_for(outs.device)
    with on(outs.device):
        error = module.attnloom_merge(ctypes.byref(params))
    if error:
        raise AttnloomError(f"states were not merged: CUDA error {error}")
    return out, lse


def finish_state(
    engine: Attention,
    plan: Plan,
    out_state: Tensor,
    lse_state: Tensor | None,
    *,
    params: Mapping[str, Value] | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Turn merged states into the finished rows: the sink and output_transform act here, once.

    Args:
        engine: whose variant it is.
        plan: of the step: which rows belong to which request.
        out_state: float32 ``[total_q, num_qo_heads, head_dim_v]``.
        lse_state: float32 ``[total_q, num_qo_heads]``, or None for a variant without softmax.
        params: the variant's parameters.
        out: ``[>= total_q, num_qo_heads, head_dim_v]`` in the engine's dtype; None: a new one.
        return_lse: also return the LSE of the finished rows.
    """
    return engine.finish(plan, out_state, lse_state, params=params, out=out, return_lse=return_lse)
