"""Once per step and group of layers: what the layers make their plans from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, SinkFullAttentionSpec

from attnloom.adapters.page_table import paged_layout, ragged_layout
from attnloom.backends.vllm.device_steps import DeviceStep, RowStarts
from attnloom.backends.vllm.impl import AttnloomImpl
from attnloom.backends.vllm.lengths import host_kv_lengths, host_query_indptr
from attnloom.backends.vllm.metadata import AttnloomMetadata
from attnloom.backends.vllm.step_plans import StepPlans
from attnloom.core.block_mask import BlockMask

if TYPE_CHECKING:
    from attnloom.backends.vllm.step_plans import MakePlan


class AttnloomMetadataBuilder(AttentionMetadataBuilder[AttnloomMetadata]):
    """Gives its layers what they make plans from, once a step.

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
        longest = vllm_config.model_config.max_model_len
        kept = {impl.plan_id(True): impl.kept_mask(longest) for impl in impls.values()}
        self.masks = {key: mask for key, mask in kept.items() if mask is not None}
        self.starts = RowStarts(device)
        self.sinks = [pair for impl in impls.values() if (pair := impl.converted_sinks()) is not None]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Any batch: one kernel and one grid serve every mixture, and a graph makes its own plans.

        No graphs for encoder-only layers, whose keys lie elsewhere each step.
        """
        on_cpu = vllm_config.device_config.device_type == "cpu"
        if on_cpu or isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttnloomMetadata:
        """The metadata of one step.

        Plans are made on a CPU from the lengths there; on a GPU from those there, of which the host knows nothing.

        Raises:
            NotImplementedError: if causality differs from request to request within the step.
        """
        return self._build(common_attn_metadata, capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> AttnloomMetadata:
        """The same for a step that is to be captured, of which replays will be longer."""
        return self._build(common_attn_metadata, capture=True)

    def _build(self, common: Any, capture: bool) -> AttnloomMetadata:
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "attnloom does not support steps in which some requests are causal and others are not"
            )
        make = self._on_host(common) if self.device.type == "cpu" else self._on_device(common, capture)
        return AttnloomMetadata(
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
            slot_mapping=common.slot_mapping,
            plans=StepPlans(make, common.causal),
        )

    def _on_host(self, common: Any) -> MakePlan:
        causal, indptr = common.causal, host_query_indptr(common)
        if self.keys_are_in_pages:
            lengths = common.seq_lens[: common.num_reqs]
            layout = paged_layout(common.block_table_tensor, lengths, self.page_size)
            kv_lens = host_kv_lengths(common)
        else:
            layout = ragged_layout(common.query_start_loc[: common.num_reqs + 1])
            kv_lens = indptr[1:] - indptr[:-1]
        masks = self._masks(int(kv_lens.max()) if self.masks and kv_lens.numel() else 0)
        return lambda layer, key: layer.engines[causal].plan(
            indptr, layout, kv_lens=kv_lens, params=layer.params(), block_mask=masks.get(key)
        )

    def _on_device(self, common: Any, capture: bool) -> MakePlan:
        if self.sinks:
            # Weights may be loaded again at any moment; the kernel reads float32.
            torch._foreach_copy_([copy for copy, _ in self.sinks], [loaded for _, loaded in self.sinks])
        # A mask stays where it is, whatever of it is known: a capture need not know all that its replays will.
        masks = self._masks(1 if capture or not self.masks else max(int(common.max_seq_len), 1))
        causal, step = common.causal, DeviceStep.of(common, self.starts, self.page_size, self.keys_are_in_pages)
        return lambda layer, key: step.plan(layer, causal, masks.get(key))

    def _masks(self, longest: int) -> dict[Hashable, BlockMask | None]:
        """Block masks by plan id, of requests of up to ``longest`` KV tokens."""
        return {key: mask.up_to(longest) for key, mask in self.masks.items() if longest > 0}


def _impls(layers: dict[str, Any]) -> dict[str, AttnloomImpl]:
    found = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {name: impl for name, impl in found.items() if isinstance(impl, AttnloomImpl)}
