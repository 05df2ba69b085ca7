"""Entry points: what vLLM calls, in every one of its processes, to find attnloom.

This module imports neither torch nor vLLM when it is loaded: vLLM reads entry points before it has chosen a platform.
"""

from __future__ import annotations

BACKEND = "attnloom.backends.vllm.backend.AttnloomBackend"
PLATFORM = "attnloom.backends.vllm.platform.AttnloomCpuPlatform"


def register() -> None:
    """`vllm.general_plugins`: make `--attention-backend CUSTOM` mean attnloom. Calling it again changes nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from attnloom.backends.vllm.compat import adopt_skipped_platform

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    adopt_skipped_platform()


def platform() -> str | None:
    """`vllm.platform_plugins`: the platform that honours CUSTOM on a CPU build of vLLM; None on any other build.

    vLLM admits one platform plugin at a time, so answering on a CUDA build would displace the GPU.
    """
    from vllm.platforms import cpu_platform_plugin

    return PLATFORM if cpu_platform_plugin() is not None else None
