"""What the backend can serve of a model and its server, and the words for what it cannot."""

from __future__ import annotations

from typing import Any

import torch

from attnloom.backends.sglang import compat
from attnloom.core.tiles import CPU, Family, family_for


def refusals(runner: Any) -> list[str]:
    """Every reason, in words, why attnloom cannot serve this model in this server; empty when it can.

    Args:
        runner: SGLang's ModelRunner, with model and memory pools.
    """
    arguments, pool = runner.server_args, runner.token_to_kv_pool
    device = torch.device(runner.device)
    kernels, unserved = _family(device)
    on_gpu = device.type != "cpu"
    kept = (runner.dtype, *kernels.kv_dtypes)
    checks = (
        (bool(unserved), unserved),
        (
            runner.dtype not in kernels.dtypes,
            f"dtype {runner.dtype} is not supported on {device.type}, only {', '.join(map(str, kernels.dtypes))}",
        ),
        (
            runner.kv_cache_dtype not in kept,
            f"--kv-cache-dtype {runner.kv_cache_dtype} is not supported on {device.type}: keys and values are kept as "
            f"{' or '.join(map(str, kept))}",
        ),
        (_is_mla(runner), "multi-head latent attention (MLA) is not supported yet"),
        (_get(pool, "use_hnd", "kv_cache_layout") in (True, "vectorized_5d"), _LAYOUT),
        (bool(_get(pool, "is_quantized_kv_cache")), "quantised KV caches are not supported yet"),
        (
            getattr(getattr(runner, "token_to_kv_pool_allocator", None), "translate_kv_loc", None) is not None,
            "the unified memory pool is not supported yet",
        ),
        (
            compat.captures_prompts(arguments),
            "full CUDA graphs of prefill are not supported yet: expected --cuda-graph-backend-prefill breakable, "
            "tc_piecewise or disabled",
        ),
        (
            on_gpu and bool(getattr(arguments, "enable_two_batch_overlap", False)),
            "--enable-two-batch-overlap is not supported on a GPU yet",
        ),
        (
            bool(arguments.enable_deterministic_inference) and drafts_trees(arguments),
            "--enable-deterministic-inference with trees of drafts is not supported yet: expected "
            "--speculative-eagle-topk 1",
        ),
        ((getattr(arguments, "dcp_size", None) or 1) > 1, "decode context parallelism is not supported yet"),
        (
            getattr(arguments, "dllm_algorithm", None) is not None,
            "diffusion language models (--dllm-algorithm) are not supported yet",
        ),
    )
    return [reason for wrong, reason in checks if wrong]


def drafts_trees(arguments: Any) -> bool:
    """Whether speculative decoding may verify trees of drafts, and not chains only."""
    return bool(arguments.speculative_algorithm) and (arguments.speculative_eagle_topk or 0) != 1


_LAYOUT = (
    "KV caches are supported in the layout [tokens, heads, head size] only, where slots lie evenly spaced: unset "
    "SGLANG_USE_HND_KVCACHE"
)


def _family(device: torch.device) -> tuple[Family, str]:
    """The kernels that serve a device; otherwise those of a CPU, and why there are none."""
    if device.type == "cuda" and torch.version.hip is not None:
        return CPU, "GPUs of AMD are not supported"
    try:
        return family_for(device), ""
    except ValueError as error:
        return CPU, f"the device is not supported: {error}"


def bidirectional_refusal(runner: Any) -> str | None:
    """Why layers whose prompts are bidirectional cannot be served; None when they can."""
    if runner.server_args.chunked_prefill_size == -1:
        return None
    return (
        "prompts of this model are bidirectional, and a part of one cannot see what comes after: expected "
        f"--chunked-prefill-size -1, got {runner.server_args.chunked_prefill_size}"
    )


def _is_mla(runner: Any) -> bool:
    return str(getattr(getattr(runner.model_config, "attention_arch", None), "name", "")) == "MLA"


def _get(pool: Any, *names: str) -> Any:
    """The first of these that is set, of a pool or of the pools inside it."""
    pools = [pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))]
    return next((value for one in pools for name in names if (value := getattr(one, name, None))), None)
