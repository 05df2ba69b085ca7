"""The class that vLLM loads for `--attention-backend CUSTOM`: what is supported, and who builds and runs it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from attnloom.backends.vllm import compat, support


class AttnloomBackend(AttentionBackend):
    """attnloom as a vLLM attention backend. vLLM reads classmethods only; the class is never instantiated."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(support.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *support.FLOAT8]

    @staticmethod
    def get_name() -> str:
        """`CUSTOM`: the layer looks this name up among the members of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The per-layer part."""
        from attnloom.backends.vllm.impl import AttnloomImpl

        return AttnloomImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The per-step part."""
        from attnloom.backends.vllm.builder import AttnloomMetadataBuilder

        return AttnloomMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size. The plain 16 is for vLLM 0.26, which gives windowed layers the smallest size named here."""
        return [16, MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes for which kernels exist."""
        return list(support.HEAD_SIZES)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder, encoder-only and cross attention."""
        return attn_type in support.ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks are run-time arguments of the kernel."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are run-time arguments of the plan, and may differ from layer to layer."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Every decoder layer has a plan for causal and one for bidirectional steps."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Not yet."""
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        """Not yet (0.26 assumes True of a backend that does not say)."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The plan is made from the query lengths that the host knows."""
        return False

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """Every reason, in words, why this kind of layer cannot be served; vLLM refuses to start when there is one.

        Args:
            configuration: the fields of vLLM's AttentionSelectorConfig and `device_capability`, which differ between
                versions of vLLM.
        """
        return support.refusals(**configuration)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        """0.32: every layout, since the engine reads any strides."""
        return compat.kv_cache_layouts()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """0.26: the logical shape of a layer's cache, keys in the first half of the last dimension."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """0.26: the physical order of those dimensions."""
        return compat.kv_cache_stride_order(include_num_layers_dimension)

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """0.26: no; it shares one prefix among all requests, which is not how this engine shares prefixes."""
        return False
