"""FlashInfer's kernels for a batch with a page table, planned as its users plan them (written against 0.7.4).

Wrappers are planned without their CUDA-graph mode, which pads the grid: lengths do not change between replays here, so
the exact grid may be captured. One new token a request needs no causal mask, and is planned without.
"""

from __future__ import annotations

import torch

from gpu.case import Case, Runner

WORKSPACE_BYTES = 512 << 20


def prefill_wrapper(case: Case, backend: str) -> Runner:
    """``fa2`` or ``fa3``, the tensor-core kernels that serve every batch."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    shape, out = case.shape, torch.empty_like(case.q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        case.qo_indptr,
        case.page_indptr,
        case.page_ids,
        last_page_len(case),
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        causal=max(shape.qo_lens) > 1,
        sm_scale=case.sm_scale,
        window_left=-1 if shape.window is None else shape.window - 1,
        q_data_type=case.q.dtype,
        kv_data_type=case.k.dtype,
    )
    caches = (case.k, case.v)
    return Runner(lambda: wrapper.run(case.q, caches, k_scale=case.k_scale, v_scale=case.v_scale, out=out), out)


def fa2(case: Case) -> Runner:
    return prefill_wrapper(case, "fa2")


def fa3(case: Case) -> Runner:
    return prefill_wrapper(case, "fa3")


def persistent(case: Case) -> Runner:
    """``BatchAttention``: prefill and decode in one persistent launch."""
    from flashinfer import BatchAttention

    shape, out = case.shape, torch.empty_like(case.q)
    lse = torch.empty(case.q.shape[:2], dtype=torch.float32, device="cuda")
    wrapper = BatchAttention("NHD", "cuda")
    wrapper.plan(
        case.qo_indptr,
        case.page_indptr,
        case.page_ids,
        case.kv_lens,
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.head_dim,
        shape.page_size,
        causal=max(shape.qo_lens) > 1,
        sm_scale=case.sm_scale,
        q_data_type=case.q.dtype,
        kv_data_type=case.k.dtype,
    )
    caches = (case.k, case.v)
    return Runner(
        lambda: wrapper.run(case.q, caches, out=out, lse=lse, k_scale=case.k_scale, v_scale=case.v_scale), out
    )


def decode(case: Case) -> Runner:
    """The decode wrapper without tensor cores."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    shape, out = case.shape, torch.empty_like(case.q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        case.page_indptr,
        case.page_ids,
        last_page_len(case),
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        sm_scale=case.sm_scale,
        q_data_type=case.q.dtype,
        kv_data_type=case.k.dtype,
    )
    return Runner(lambda: wrapper.run(case.q, (case.k, case.v), out=out), out)


def last_page_len(case: Case) -> torch.Tensor:
    """Tokens in each request's last page."""
    return (case.kv_lens - 1) % case.shape.page_size + 1
