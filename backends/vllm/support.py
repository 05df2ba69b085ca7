"""What the backend can serve, and the words for what it cannot.

vLLM hands `validate_configuration` one flag per feature of a layer or of the engine. Each answers here with a
sentence: what was asked for, and what is served instead. A flag of a later vLLM that is not known here and is set
is refused as well, because serving it as if it were not there could give other tokens.
"""

from __future__ import annotations

from typing import Any

import torch

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION_TYPES = ("decoder", "encoder_only", "encoder_decoder")

# Flags that are either served or say nothing, whatever their value.
_SERVED = frozenset({"has_sink", "has_sliding_window", "use_non_causal", "block_size"})

_REFUSED = {
    # vLLM gives a compute capability on GPUs only.
    "device_capability": "GPUs are not supported yet: this version of attnloom has kernels for CPUs only",
    "use_mla": "multi-head latent attention (MLA) is not supported yet",
    "use_sparse": "sparse attention is not supported yet",
    "use_mm_prefix": "bidirectional attention over multimodal tokens (mm_prefix) is not supported yet",
    "use_per_head_quant_scales": "per-head scales of a quantised KV cache are not supported yet",
    "use_batch_invariant": "VLLM_BATCH_INVARIANT is not supported yet; unset it",
    "use_kv_connector": "KV connectors (kv_transfer_config) are not supported yet",
    "use_pcp": "prefill context parallelism is not supported yet",
    "use_dcp": "decode context parallelism is not supported yet",
    "use_adaptive_verification": "adaptive verification is not supported: the plan of a step is made from the query "
    "lengths that the host knows, and adaptive verification changes them on the device",
    "use_rswa": "reference sliding window attention (R-SWA) is not supported yet",
}


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16: the name that vLLM's settings use."""
    return str(dtype).removeprefix("torch.")


def refusals(
    *, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, attn_type: str, **flags: Any
) -> list[str]:
    """Every reason, in words, why a layer cannot be served; empty when it can.

    Args:
        head_size: elements of one head.
        dtype: of queries, keys and values.
        kv_cache_dtype: vLLM's `--kv-cache-dtype`; None and "auto" mean `dtype`.
        attn_type: vLLM's AttentionType value.
        flags: the other fields of vLLM's AttentionSelectorConfig, by name.
    """
    reasons = []
    if head_size not in HEAD_SIZES:
        reasons.append(f"head_size {head_size} is not supported, only {', '.join(map(str, HEAD_SIZES))}")
    if dtype not in DTYPES:
        reasons.append(f"dtype {dtype_name(dtype)} is not supported, only {', '.join(map(dtype_name, DTYPES))}")
    if kv_cache_dtype not in (None, "auto", dtype_name(dtype)):
        reasons.append(
            f"kv_cache_dtype {kv_cache_dtype} is not supported yet: keys and values are kept in the model's own dtype, "
            f'"auto" or "{dtype_name(dtype)}"'
        )
    if attn_type not in ATTENTION_TYPES:
        reasons.append(f"attention type {attn_type} is not supported, only {', '.join(ATTENTION_TYPES)}")
    for name, value in flags.items():
        if not value or name in _SERVED:
            continue
        reasons.append(_REFUSED.get(name, f"{name}={value} is not known to this version of attnloom"))
    return reasons
