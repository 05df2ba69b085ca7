"""What the backend can serve, and the words for what it cannot.

vLLM hands `validate_configuration` one flag per feature of a layer or of the engine. Each answers here with a
sentence: what was asked for, and what is served instead. A flag of a later vLLM that is not known here and is set
is refused as well, because serving it as if it were not there could give other tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from attnloom.core.tiles import CPU, HEAD_DIMS, SM80, Family

HEAD_SIZES = HEAD_DIMS
DTYPES = CPU.dtypes
FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""What `--kv-cache-dtype` calls the eight-bit formats. vLLM's caches of them are uint8."""
LEAST_CAPABILITY = (8, 0)
ATTENTION_TYPES = ("decoder", "encoder_only", "encoder_decoder")

# Flags that are either served or say nothing, whatever their value.
_SERVED = frozenset({"has_sink", "has_sliding_window", "use_non_causal", "block_size"})

_REFUSED = {
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


def family(device_capability: Any) -> Family:
    """The kernels that would serve; vLLM gives a compute capability on GPUs only."""
    return CPU if device_capability is None else SM80


def cache_dtype(kv_cache_dtype: str | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a layer's cache; None and "auto" mean `dtype`."""
    return FLOAT8.get(kv_cache_dtype or "auto", dtype)


def refusals(
    *,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    attn_type: str,
    device_capability: Any = None,
    **flags: Any,
) -> list[str]:
    """Every reason, in words, why a layer cannot be served; empty when it can.

    Args:
        head_size: elements of one head.
        dtype: of queries, keys and values.
        kv_cache_dtype: vLLM's `--kv-cache-dtype`; None and "auto" mean `dtype`.
        attn_type: vLLM's AttentionType value.
        device_capability: vLLM's DeviceCapability of a GPU; None on a CPU.
        flags: the other fields of vLLM's AttentionSelectorConfig, by name.
    """
    reasons = []
    kernels = family(device_capability)
    if device_capability is not None:
        found = (device_capability.major, device_capability.minor)
        if found < LEAST_CAPABILITY:
            reasons.append(f"compute capability {found[0]}.{found[1]} is not supported, only 8.0 (Ampere) and newer")
    if head_size not in HEAD_SIZES:
        reasons.append(f"head_size {head_size} is not supported, only {', '.join(map(str, HEAD_SIZES))}")
    if dtype not in kernels.dtypes:
        reasons.append(f"dtype {dtype_name(dtype)} is not supported, only {', '.join(map(dtype_name, kernels.dtypes))}")
    if (reason := _cache_refusal(kv_cache_dtype, dtype, kernels)) is not None:
        reasons.append(reason)
    if attn_type not in ATTENTION_TYPES:
        reasons.append(f"attention type {attn_type} is not supported, only {', '.join(ATTENTION_TYPES)}")
    for name, value in flags.items():
        if not value or name in _SERVED:
            continue
        reasons.append(_REFUSED.get(name, f"{name}={value} is not known to this version of attnloom"))
    return reasons


def _cache_refusal(kv_cache_dtype: str | None, dtype: torch.dtype, kernels: Family) -> str | None:
    if kv_cache_dtype in (None, "auto", dtype_name(dtype)):
        return None
    served = [name for name, eight in FLOAT8.items() if eight in kernels.kv_dtypes]
    if kv_cache_dtype in served:
        return None
    return (
        f"kv_cache_dtype {kv_cache_dtype} is not supported here: keys and values are kept in the model's own dtype, "
        + ", ".join(f'"{name}"' for name in ("auto", dtype_name(dtype), *served))
    )
