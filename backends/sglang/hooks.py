"""Where SGLang decides by a backend's name, from lists that an outsider cannot join: hooks that answer for ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnloom.backends.sglang.plugin import NAME

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_installed = False


def install() -> None:
    """Register the hooks, once; SGLang applies them after all plugins have been called."""
    global _installed
    if _installed:
        return
    _installed = True
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("sglang.srt.utils.common.support_triton", support_triton),
        ("sglang.srt.mem_cache.allocation.get_last_loc", get_last_loc),
        (f"{_FACTORY}.create_decode_backend", create_decode_backend),
        (f"{_FACTORY}.create_draft_extend_backend", create_draft_extend_backend),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def support_triton(original: Callable[..., bool], backend: str) -> bool:
    """SGLang takes any backend but two for one with a GPU under it, and writes its token table with Triton."""
    return original(backend) if backend != NAME else not _on_cpu()


def get_last_loc(original: Callable[..., Any], table: Any, rows: Any, prefix_lens: Any) -> Any:
    """The last slot of each request's prefix: SGLang reads it with Triton unless the backend is one of two."""
    from sglang.srt.runtime_context import get_exec

    if get_exec().kernel.attention_backend != NAME or not _on_cpu():
        return original(table, rows, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(table, rows, prefix_lens)


def create_decode_backend(original: Callable[..., Any], factory: Any) -> Any:
    """Drafting of several steps with our backend: a backend a step."""
    if factory.speculative_num_steps <= 1 or _chosen(factory, "decode") != NAME:
        return original(factory)
    from attnloom.backends.sglang.draft import AttnloomMultiStepDraftBackend

    return AttnloomMultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_draft_extend_backend(original: Callable[..., Any], factory: Any) -> Any:
    """The draft model reads what the target accepted, with our backend."""
    from sglang.srt.runtime_context import get_spec

    mode = "decode" if get_spec().speculative_attention_mode == "decode" else "prefill"
    if _chosen(factory, mode) != NAME:
        return original(factory)
    from attnloom.backends.sglang.backend import AttnloomAttnBackend

    return AttnloomAttnBackend(factory.draft_model_runner)


def _chosen(factory: Any, mode: str) -> str | None:
    """The name of the backend that the factory would look for in its list."""
    arguments = factory.server_args
    name: str | None = factory.draft_attn_backend
    return name or getattr(arguments, f"{mode}_attention_backend") or arguments.attention_backend


def _on_cpu() -> bool:
    from sglang.srt.utils.common import is_cpu

    return bool(is_cpu())
