"""One layer: its compiled engine, its run-time parameters, and the two calls vLLM makes every step."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from attnloom import Attention, append_kv
from attnloom.adapters.page_table import split_interleaved_cache
from attnloom.backends.features import kept_mask, layer_params, plan_id
from attnloom.backends.vllm.metadata import AttnloomMetadata
from attnloom.backends.vllm.support import cache_dtype
from attnloom.backends.vllm.variant import chosen_variants, layer_variant
from attnloom.core.params import Value, ordered
from attnloom.core.position_mask import PositionMask

# Named so that it shows under vLLM's own logging configuration.
logger = init_logger("vllm.attnloom.impl")


class AttnloomImpl(AttentionImpl[AttnloomMetadata]):
    """The attention of one layer. Its kernel is built here, when vLLM creates the layer, never inside a request."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        """As vLLM's attention layer calls it, under the model's default dtype.

        Raises:
            NotImplementedError: for an argument of a layer that attnloom does not know.
            ValueError: from the engine, for heads it has no kernel for.
        """
        unknown = {name: value for name, value in unknown.items() if value is not None}
        if unknown:
            raise NotImplementedError(f"attnloom does not support attention layers with {unknown}")
        # vLLM reads these names.
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.logits_soft_cap = logits_soft_cap or None
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

        self.encoder_only = attn_type == AttentionType.ENCODER_ONLY
        self.dtype = torch.get_default_dtype()
        self.cache_dtype = cache_dtype(kv_cache_dtype, self.dtype)
        self.device = torch.get_default_device()
        # On a GPU kernels read the sinks at one address, in graphs too; the builder keeps what lies there up to date.
        self._kernel_sinks = sinks
        if sinks is not None and sinks.dtype != torch.float32 and self.device.type != "cpu":
            self._kernel_sinks = sinks.detach().to(torch.float32)
        self._params: dict[str, Any] | None = None
        self._plan_ids: dict[bool, Hashable] = {}
        self._split: tuple[weakref.ref[Tensor], Tensor, Tensor] | None = None
        self.chosen = chosen_variants()
        self.engines: dict[bool, Attention] = {}
        if not self.chosen.by_layer:
            self.build_engines()

    def build_engines(self, layer_name: str = "") -> None:
        """Compile or load the kernels, once.

        vLLM tells a layer's name only after it has made the layer. Where variants differ from layer to layer, kernels
        are built when the builder of its metadata is made, which is still before the engine is healthy.

        Raises:
            ValueError: a chosen variant does not go with this layer, or a parameter has no value.
        """
        if self.engines:
            return
        tables = self.chosen.of(layer_name)
        # By causality of the step: cross and encoder-only layers see bidirectional steps only, decoders both. The two
        # differ in what their plans cover; they run one kernel.
        self.engines = {
            causal: Attention(
                self.num_heads,
                self.num_kv_heads,
                self.head_size,
                dtype=self.dtype,
                kv_dtype=self.cache_dtype,
                variant=layer_variant(
                    causal=causal,
                    sliding_window=self.sliding_window,
                    soft_cap=self.logits_soft_cap is not None,
                    alibi=self.alibi_slopes is not None,
                    sinks=self.sinks is not None,
                    tables=tables,
                ),
                device=self.device,
            )
            for causal in (True, False)
        }
        sizes = {"num_qo_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        sizes |= {"head_dim": self.head_size, "head_dim_v": self.head_size}
        variant = self.engines[True].variant
        try:
            device = self.engines[True].device
            captures = {name: _on(device, value) for name, value in variant.captures.items()}
            ordered(variant.params, captures, self.params(), sizes, device)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{' and '.join(table.place for table in tables)}: {variant.name}: {error}") from error
        if tables:
            places = ", ".join(table.place for table in tables)
            logger.info_once("Attention layers compute %s, as chosen by %s", variant.name, places)

    def params(self) -> dict[str, Any]:
        """The variant's run-time parameters that the layer itself has, by name."""
        if self._params is None:
            params = layer_params(
                self.engines[True].variant,
                logit_cap=self.logits_soft_cap,
                alibi_slopes=self.alibi_slopes,
                sinks=self._kernel_sinks,
            )
            if self.device.type == "cpu":
                return params
            self._params = params
        return self._params

    def converted_sinks(self) -> tuple[Tensor, Tensor] | None:
        """On a GPU: the sinks as kernels read them, and the weights they are a copy of; None where there is no copy."""
        if self.sinks is None or self._kernel_sinks is None or self._kernel_sinks is self.sinks:
            return None
        return self._kernel_sinks, self.sinks

    def kept_mask(self, length: int) -> PositionMask | None:
        """The block mask of causal steps, where the variant has one that serves every step."""
        return kept_mask(self.engines[True], length, self.params())

    def plan_id(self, causal: bool) -> Hashable:
        """Layers with the same one share a plan. A range that the variant declares may depend on its parameters."""
        found = self._plan_ids.get(causal)
        if found is None:
            own = (self.logits_soft_cap, self.alibi_slopes, self.sinks)
            found = self._plan_ids[causal] = plan_id(self.engines[causal], own)
        return found

    def _halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the layer's cache, the same views as long as it is the same cache."""
        if self._split is None or self._split[0]() is not kv_cache:
            typed = kv_cache if kv_cache.dtype == self.cache_dtype else kv_cache.view(self.cache_dtype)
            self._split = (weakref.ref(kv_cache), *split_interleaved_cache(typed, self.head_size))
        return self._split[1:]

    def _scales(self, layer: Any) -> tuple[float | None, float | None]:
        """Of an eight-bit cache."""
        if self.cache_dtype == self.dtype:
            return None, None
        return layer._k_scale_float, layer._v_scale_float

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AttnloomMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's queries, written to `output`.

        Args:
            layer: vLLM's attention layer.
            query: [tokens, num_heads, head_size]; rows past the plan's queries are padding.
            key: [tokens, num_kv_heads, head_size], read here by encoder-only layers and nobody else.
            value: like key.
            kv_cache: [pages, num_kv_heads, page_size, 2 * head_size], any strides.
            attn_metadata: None in vLLM's profiling and warm-up runs.
            output: [tokens, num_heads, head_size].
            output_scale: fused output quantisation, not supported.
            output_block_scale: the same.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attnloom does not support fused output quantisation yet")
        if attn_metadata is None:
            return output.zero_()
        if self.encoder_only:
            keys, values = key.unsqueeze(1), value.unsqueeze(1)
        else:
            keys, values = self._halves(kv_cache)
        engine = self.engines[attn_metadata.causal]
        plan = attn_metadata.plans.of(self)
        k_scale, v_scale = self._scales(layer)
        engine.run(
            plan,
            query,
            keys,
            values,
            sm_scale=self.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            params=self.params() or None,  # the engine's shortest way is that without
            out=output,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys and values to their slots; slot -1 is skipped.

        Args:
            layer: vLLM's attention layer.
            key: [>= slots, num_kv_heads, head_size].
            value: like key.
            kv_cache: [pages, num_kv_heads, page_size, 2 * head_size], any strides; empty while vLLM profiles.
            slot_mapping: int64 [slots], page * page_size + offset.
        """
        # Encoder-only layers keep no cache, and a layer that shares another layer's cache finds it written.
        if self.encoder_only or self.kv_sharing_target_layer_name is not None or kv_cache.numel() == 0:
            return
        keys, values = self._halves(kv_cache)
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:
            key, value = key[:tokens], value[:tokens]
        k_scale, v_scale = self._scales(layer)
        append_kv(key, value, keys, values, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _on(device: torch.device, value: Value) -> Value:
    return value.to(device) if isinstance(value, Tensor) else value
