"""Entry point: what SGLang calls, in every one of its processes, to find attnloom.

This module imports neither torch nor SGLang when it is loaded.
"""

from __future__ import annotations

from typing import Any

NAME = "attnloom"


def register() -> None:
    """`sglang.srt.plugins`: make `--attention-backend attnloom` known. Calling it again changes nothing.

    SGLang only logs what a plugin raises and goes on without it. So nothing is raised for a SGLang that attnloom does
    not go with: the name is registered all the same, and choosing it stops SGLang with the reason.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from attnloom.backends.sglang.compat import refusals

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
        # A request's bits are the same whatever is batched with it, and on a prefix from the cache.
        server_args.add_deterministic_attention_backend_choices([NAME])
        server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
    reasons = refusals()
    if not reasons:
        from attnloom.backends.sglang.hooks import install

        install()

    @register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        if reasons:
            raise RuntimeError(f"--attention-backend {NAME} cannot be used with this SGLang: {'; '.join(reasons)}")
        from attnloom.backends.sglang.backend import AttnloomAttnBackend

        return AttnloomAttnBackend(runner)
