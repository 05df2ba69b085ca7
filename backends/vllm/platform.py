"""vLLM's CPU platform, with one thing mended: it asks the chosen attention backend instead of ignoring the choice.

CpuPlatform answers any `--attention-backend` with CPU_ATTN and one line of log, and never calls
`validate_configuration`, which the CUDA platform does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attnloom.backends.vllm.variant import check_nothing_is_ignored

if TYPE_CHECKING:
    from vllm.platforms.cpu import CpuPlatform as BaseCpuPlatform
else:
    # Whatever vLLM itself would choose on this CPU: CpuPlatform, or its subclass for AMD's zentorch.
    BaseCpuPlatform = resolve_obj_by_qualname(cpu_platform_plugin())

# Named so that it shows under vLLM's own logging configuration.
logger = init_logger("vllm.attnloom.platform")


class AttnloomCpuPlatform(BaseCpuPlatform):
    """The CPU platform that honours `CUSTOM`, and nothing else about it changed."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The qualified name of the backend class for one kind of layer.

        Raises ValueError with every reason in words when CUSTOM was asked for and cannot serve the layer: vLLM calls
        this while it builds the model, so the engine stops before it is healthy.
        """
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            check_nothing_is_ignored()
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        backend = AttentionBackendEnum.CUSTOM.get_class()
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"--attention-backend CUSTOM cannot serve this model: {'; '.join(reasons)}")
        path = AttentionBackendEnum.CUSTOM.get_path()
        logger.info_once("Attention backend CUSTOM is %s", path)
        return path
