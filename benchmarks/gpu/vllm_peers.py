"""vLLM's two attention kernels, called as its backends call them (written against 0.26.0)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gpu.case import Case, Runner

# vllm/v1/attention/backends/triton_attn.py: where a decode is cut into segments, and into how many.
TRITON_SMALLEST_GRID, TRITON_SEGMENTS = 128, 16


def flash_attention_3(case: Case) -> Runner:
    """With the scheduler metadata that vLLM computes ahead of the layers."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    shape, out = case.shape, torch.empty_like(case.q)
    window = [-1, -1] if shape.window is None else [shape.window - 1, 0]
    longest_q, longest, indptr = max(shape.qo_lens), max(shape.kv_lens), case.qo_indptr.cuda()
    metadata = get_scheduler_metadata(
        batch_size=len(shape.kv_lens),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest,
        num_heads_q=shape.num_qo_heads,
        num_heads_kv=shape.num_kv_heads,
        headdim=shape.head_dim,
        cache_seqlens=case.lengths,
        qkv_dtype=case.q.dtype,
        cu_seqlens_q=indptr,
        page_size=shape.page_size,
        causal=True,
        window_size=tuple(window),
        num_splits=0,
    )
    return Runner(
        lambda: flash_attn_varlen_func(
            q=case.q,
            k=case.k,
            v=case.v,
            out=out,
            cu_seqlens_q=indptr,
            max_seqlen_q=longest_q,
            seqused_k=case.lengths,
            max_seqlen_k=longest,
            softmax_scale=case.sm_scale,
            causal=True,
            window_size=window,
            block_table=case.table,
            scheduler_metadata=metadata,
            fa_version=3,
            num_splits=0,
        ),
        out,
    )


def dense_flash_attention_3(
    requests: int, length: int, heads: tuple[int, int], head_dim: int
) -> list[Callable[[], object]]:
    """FA3 without paging, causal, requests of one length with nothing cached, in each way that the build takes them.

    Keys and values as ragged rows or as one tensor, each with scheduler metadata and without.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    tokens = requests * length
    q, k, v = (
        torch.randn(tokens, count, head_dim, device="cuda", dtype=torch.bfloat16)
        for count in (heads[0], heads[1], heads[1])
    )
    indptr = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * length
    lengths = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    metadata = get_scheduler_metadata(
        batch_size=requests,
        max_seqlen_q=length,
        max_seqlen_k=length,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        headdim=head_dim,
        cache_seqlens=lengths,
        qkv_dtype=q.dtype,
        cu_seqlens_q=indptr,
        causal=True,
        num_splits=1,
    )
    one = (requests, length, heads[1], head_dim)
    ragged = {"k": k, "v": v, "cu_seqlens_k": indptr}
    batched = {"k": k.view(one), "v": v.view(one), "seqused_k": lengths}
    return [
        partial(
            flash_attn_varlen_func,
            q=q,
            out=torch.empty_like(q),
            cu_seqlens_q=indptr,
            max_seqlen_q=length,
            max_seqlen_k=length,
            softmax_scale=head_dim**-0.5,
            causal=True,
            fa_version=3,
            num_splits=1,
            scheduler_metadata=scheduling,
            **keys,
        )
        for keys in (ragged, batched)
        for scheduling in (metadata, None)
    ]


def triton(case: Case) -> Runner:
    """The unified attention kernel, with the buffers that let it cut small decodes into segments."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    shape, out = case.shape, torch.empty_like(case.q)
    threshold = TRITON_SMALLEST_GRID // shape.num_kv_heads
    states = (threshold, shape.num_qo_heads, TRITON_SEGMENTS)
    segment_out = torch.empty(*states, shape.head_dim, device="cuda")
    segment_max, segment_sum = torch.empty(states, device="cuda"), torch.empty(states, device="cuda")
    scale_shape = (len(shape.kv_lens), shape.num_kv_heads)
    k_scale, v_scale = (
        torch.tensor(scale, device="cuda").expand(scale_shape) for scale in (case.k_scale, case.v_scale)
    )
    indptr, longest_q, longest = case.qo_indptr.cuda(), max(shape.qo_lens), max(shape.kv_lens)
    return Runner(
        lambda: unified_attention(
            q=case.q,
            k=case.k,
            v=case.v,
            out=out,
            cu_seqlens_q=indptr,
            max_seqlen_q=longest_q,
            seqused_k=case.lengths,
            max_seqlen_k=longest,
            softmax_scale=case.sm_scale,
            causal=True,
            window_size=(-1, -1) if shape.window is None else (shape.window - 1, 0),
            block_table=case.table,
            softcap=0,
            q_descale=None,
            k_descale=k_scale if shape.fp8_kv else None,
            v_descale=v_scale if shape.fp8_kv else None,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=TRITON_SEGMENTS,
            softmax_segm_output=segment_out,
            softmax_segm_max=segment_max,
            softmax_segm_expsum=segment_sum,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if shape.fp8_kv else KVQuantMode.NONE,
        ),
        out,
    )
