"""What attnloom needs of SGLang, found by looking for it and never by comparing versions.

A name that moved is a sentence here, and SGLang stops with it when attnloom is chosen. What a plugin raises SGLang
only logs.
"""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from operator import attrgetter
from typing import Any

_BASE = "sglang.srt.layers.attention"
# Module, name in it, and what attnloom does with it.
_NEEDED = (
    (f"{_BASE}.base_attn_backend", "AttentionBackend.init_forward_metadata_out_graph", "steps begin there"),
    (f"{_BASE}.base_attn_backend", "AttentionBackend.init_forward_metadata_in_graph", "steps are recorded there"),
    (f"{_BASE}.base_attn_backend", "AttentionBackend.needs_cpu_seq_lens", "lengths stay where they are"),
    ("sglang.srt.layers.radix_attention", "RadixAttention", "what layers are"),
    ("sglang.srt.layers.radix_attention", "AttentionType.DECODER_BIDIRECTIONAL", "kinds of layers"),
    ("sglang.srt.mem_cache.memory_pool", "KVWriteLoc", "how keys are written"),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardMode.DRAFT_EXTEND_V2", "kinds of steps"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register", "lists of backends are closed"),
    ("sglang.srt.plugins.hook_registry", "HookType.AROUND", "lists of backends are closed"),
    ("sglang.srt.utils.common", "support_triton", "the name decides who writes the token table"),
    ("sglang.srt.runtime_context", "get_exec", "it knows the chosen backend"),
    ("sglang.srt.runtime_context", "get_spec", "it knows how drafts are verified"),
    ("sglang.srt.mem_cache.allocation", "get_last_loc", "the name decides who reads the token table"),
    ("sglang.srt.speculative.draft_utils", "DraftBackendFactory.create_decode_backend", "drafting has backends"),
    ("sglang.srt.speculative.draft_utils", "DraftBackendFactory.create_draft_extend_backend", "drafting has backends"),
)
_FIELDS = ("forward_mode", "batch_size", "req_pool_indices", "seq_lens", "out_cache_loc", "extend_seq_lens")
_LAYER_ARGUMENTS = (
    "num_heads",
    "head_dim",
    "scaling",
    "num_kv_heads",
    "layer_id",
    "logit_cap",
    "v_head_dim",
    "sliding_window_size",
    "is_cross_attention",
    "pos_encoding_mode",
    "logit_capping_method",
    "quant_config",
    "attn_type",
    "use_irope",
    "prefix",
    "use_prefill_attention_wrapper",  # 0.5.23: which code calls the backend
)


def refusals() -> list[str]:
    """Every reason, in words, why attnloom cannot serve in the SGLang that is installed; empty when it can."""
    reasons = [f"{module}.{name} {why} ({use})" for module, name, use in _NEEDED if (why := _lacks(module, name))]
    if not reasons:
        reasons = _moved_fields()
    if reasons:
        reasons.append(f"sglang {_version()} is installed, attnloom goes with 0.5.17 to 0.5.23")
    return reasons


def read_to_the_end() -> Any | None:
    """SGLang's word for a step that reads shared tables until its graph is done; 0.5.17 has none."""
    try:
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    except ImportError:
        return None
    return SharedReadEnds.POST_REPLAY


def captures_prompts(arguments: Any) -> bool:
    """Whether prefill steps are captured whole, layers of attention included."""
    config = getattr(arguments, "cuda_graph_config", None)
    return getattr(getattr(config, "prefill", None), "backend", None) == "full"


def verify_mask(buffer: Any, max_bs: int) -> Any | None:
    """SGLang's holder of a tree mask that has columns for drafts only; None where SGLang has no such class."""
    try:
        from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
    except ImportError:
        return None
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs)


def page_size(allocator: Any) -> int:
    """Tokens of a page: from every page_size-th column of a row on, as many have consecutive slots. 1: not known.

    It is known of two allocators. They hand out whole pages for the columns from 0 on and continue a part full page
    behind its last slot. What else writes rows keeps to that: the radix cache matches, frees and evicts whole pages,
    drafts of a chain lie in the columns behind their request. The allocator of two pools does so in both at once, and
    unmaps whole pages.

    Args:
        allocator: the runner's ``token_to_kv_pool_allocator``.
    """
    try:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    except ImportError:
        return 1
    # Not classes derived from them, which may do otherwise.
    known = type(allocator) in (PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator)
    return int(allocator.page_size) if known else 1


def _lacks(module: str, name: str) -> str:
    """What is wrong with a name of a module, or ""."""
    try:
        attrgetter(name)(importlib.import_module(module))
    except (ModuleNotFoundError, AttributeError):
        return "is missing"
    except Exception as error:  # whatever SGLang's own modules raise where they cannot be imported
        return f"cannot be imported: {error}"
    return ""


def _moved_fields() -> list[str]:
    """A field that is gone was renamed; an argument of a layer that is new may change what it computes."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    fields = ForwardBatch.__dataclass_fields__
    reasons = [f"ForwardBatch has no field {name}" for name in _FIELDS if name not in fields]
    known = [*inspect.signature(RadixAttention.__init__).parameters][1:]
    reasons += [
        f"RadixAttention has an argument {name}, which attnloom does not know"
        for name in known
        if name not in _LAYER_ARGUMENTS
    ]
    return reasons


def _version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "of an unknown version"
