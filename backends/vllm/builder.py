"""Once per step and group of layers: vLLM's metadata becomes a layout and the plans of the group."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, SinkFullAttentionSpec

from attnloom.adapters.page_table import paged_layout, ragged_layout
from attnloom.backends.vllm.device_steps import DeviceSteps
from attnloom.backends.vllm.impl import AttnloomImpl
from attnloom.backends.vllm.lengths import host_kv_lengths, host_query_indptr
from attnloom.backends.vllm.metadata import AttnloomMetadata
from attnloom.core.block_mask import BlockMask
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan


class AttnloomMetadataBuilder(AttentionMetadataBuilder[AttnloomMetadata]):
    """Makes every plan that its layers need, once a step.

    vLLM groups layers by backend, cache spec and query heads, so layers of one group may still differ in window, cap or
    sinks. Caps and sinks are arguments of the kernel; a window changes the plan, and gets one of its own.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **unused: Any
    ) -> None:
        """As vLLM calls it, after the model is loaded and before the engine is healthy.

        Raises:
            NotImplementedError: for layers that the selector could not know about.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if isinstance(kv_cache_spec, SinkFullAttentionSpec):
            raise NotImplementedError("attnloom does not support layers with static sink tokens in their KV cache yet")
        self.page_size: int = kv_cache_spec.block_size
        self.keys_are_in_pages = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        for name, layer in layers.items():
            if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
                raise NotImplementedError(
                    f"attnloom does not support values of another size than keys yet: layer {name} has head_size "
                    f"{layer.head_size} and head_size_v {layer.head_size_v}"
                )
        impls = _impls(layers)
        # A stage of a pipeline has some of the layers, and cannot tell whether a name is wrong.
        whole = vllm_config.parallel_config.pipeline_parallel_size == 1
        names = [*_impls(get_layers_from_vllm_config(vllm_config, AttentionLayerBase))] if whole else []
        for name, impl in impls.items():
            if whole:
                impl.chosen.check_names(names)
            impl.build_engines(name)
        # By causality of the step: one layer for every plan that the group needs.
        self.planners = {causal: {impl.plan_id(causal): impl for impl in impls.values()} for causal in (True, False)}
        longest = vllm_config.model_config.max_model_len
        kept = {key: impl.kept_mask(longest) for key, impl in self.planners[True].items()}
        self.masks = {key: mask for key, mask in kept.items() if mask is not None}
        self.steps = DeviceSteps(self.page_size, device)
        self.sinks = [pair for impl in impls.values() if (pair := impl.converted_sinks()) is not None]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Any batch: one kernel and one grid serve every mixture, and a graph reads the step's own plan.

        No graphs with drafts, whose runners build metadata for a graph without saying so, nor for encoder-only layers,
        whose keys lie elsewhere each step.
        """
        on_cpu = vllm_config.device_config.device_type == "cpu"
        if on_cpu or vllm_config.speculative_config is not None or isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttnloomMetadata:
        """The layout and the plans of one step.

        On a CPU from the lengths there; on a GPU from the lengths there, of which the host knows nothing.

        Raises:
            NotImplementedError: if causality differs from request to request within the step.
        """
        return self._build(common_attn_metadata, capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> AttnloomMetadata:
        """The same for a step that is to be captured: later steps of its shape have their plans at its addresses."""
        return self._build(common_attn_metadata, capture=True)

    def _build(self, common: Any, capture: bool) -> AttnloomMetadata:
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "attnloom does not support steps in which some requests are causal and others are not"
            )
        if self.device.type == "cpu":
            layout, plans = self._on_host(common)
        else:
            layout, plans = self._on_device(common, capture)
        return AttnloomMetadata(
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
            layout=layout,
            slot_mapping=common.slot_mapping,
            plans=plans,
        )

    def _on_host(self, common: Any) -> tuple[BlockSparseLayout, dict[Hashable, Plan]]:
        indptr = host_query_indptr(common)
        if self.keys_are_in_pages:
            lengths = common.seq_lens[: common.num_reqs]
            layout = paged_layout(common.block_table_tensor, lengths, self.page_size)
            kv_lens = host_kv_lengths(common)
        else:
            layout = ragged_layout(common.query_start_loc[: common.num_reqs + 1])
            kv_lens = indptr[1:] - indptr[:-1]
        longest = int(kv_lens.max()) if self.masks and kv_lens.numel() else 0
        return layout, {
            key: impl.engines[common.causal].plan(
                indptr, layout, kv_lens=kv_lens, params=impl.params(), block_mask=self._mask(key, longest)
            )
            for key, impl in self.planners[common.causal].items()
        }

    def _on_device(self, common: Any, capture: bool) -> tuple[BlockSparseLayout, dict[Hashable, Plan]]:
        if self.sinks:
            # Weights may be loaded again at any moment; the kernel reads float32.
            torch._foreach_copy_([copy for copy, _ in self.sinks], [loaded for _, loaded in self.sinks])
        if self.keys_are_in_pages:
            layout = self.steps.layout(common.block_table_tensor, common.seq_lens[: common.num_reqs])
        else:
            layout = ragged_layout(common.query_start_loc[: common.num_reqs + 1], common.num_actual_tokens)
        # A mask stays where it is, whatever of it is known: a capture need not know all that its replays will.
        longest = 1 if capture else max(int(common.max_seq_len), 1)
        return layout, {
            key: self.steps.plan(impl, key, common, layout, self._mask(key, longest), capture)
            for key, impl in self.planners[common.causal].items()
        }

    def _mask(self, key: Hashable, longest: int) -> BlockMask | None:
        mask = self.masks.get(key)
        return None if mask is None or longest == 0 else mask.up_to(longest)


def _impls(layers: dict[str, Any]) -> dict[str, AttnloomImpl]:
    found = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {name: impl for name, impl in found.items() if isinstance(impl, AttnloomImpl)}
