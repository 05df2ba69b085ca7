"""What differs between vLLM 0.26 and 0.32, found by looking for the feature and never by comparing versions."""

from __future__ import annotations

from typing import Any


def kv_cache_layouts() -> tuple[Any, ...] | None:
    """Every physical KV cache layout this vLLM knows, the preferred first, or None where it does not ask (0.26).

    The engine reads any strides, so the order is only a preference: with the tokens of one head next to each other
    (LBHNC) a work item reads one run of memory per page.
    """
    try:
        from vllm.v1.kv_cache_interface import KVCacheLayout
    except ImportError:
        return None
    preferred = ("LBHNC", "BLHNC", "BHLNC", "LBNHC", "BLNHC", "LHBNC")
    known = {layout.name: layout for layout in KVCacheLayout}
    return tuple(known[name] for name in preferred if name in known)


def kv_cache_stride_order(include_num_layers_dimension: bool) -> tuple[int, ...]:
    """0.26: the physical order of the logical dimensions [(layers,) blocks, heads, tokens, content].

    Follows `VLLM_KV_CACHE_LAYOUT` and a KV connector's wish; head-major where nobody has one. With a layers
    dimension, blocks come first: that tells vLLM that the backend reads pages by their stride.
    """
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    token_major = get_kv_cache_layout() == "NHD"
    if include_num_layers_dimension:
        return (1, 0, 3, 2, 4) if token_major else (1, 0, 2, 3, 4)
    return (0, 2, 1, 3) if token_major else (0, 1, 2, 3)


def adopt_skipped_platform() -> None:
    """Turn the running CPU platform into ours where vLLM chose it without asking the platform plugins.

    With `VLLM_TARGET_DEVICE=cpu` vLLM 0.32 resolves its own CpuPlatform and skips every platform plugin; CUSTOM would
    then be ignored without a word. Platforms hold no state, and modules keep references to the one instance, so its
    class is changed in place.
    """
    from vllm import envs

    if getattr(envs, "VLLM_TARGET_DEVICE", None) != "cpu":
        return
    from vllm.platforms import current_platform

    from attnloom.backends.vllm.platform import AttnloomCpuPlatform

    if current_platform.is_cpu() and not isinstance(current_platform, AttnloomCpuPlatform):
        current_platform.__class__ = AttnloomCpuPlatform
