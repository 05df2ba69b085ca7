"""One attention layer of a model: what it computes, in words of the engine, and its compiled kernels."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from attnloom import Attention, Variant, variants
from attnloom.backends.features import layer_params, layer_score, plan_id
from attnloom.core.params import Value
from attnloom.core.serving import Table, layer_variant
from attnloom.core.tiles import HEAD_DIMS


class Seen(Enum):
    """Which keys a query sees, besides the layer's window."""

    CAUSAL = "those up to itself"
    ALL = "all"
    TREE = "the prefix, and what a mask says of drafts"


class ServedLayer:
    """The attention of one of SGLang's RadixAttention layers."""

    def __init__(
        self,
        name: str,
        layer: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        tables: tuple[Table, ...] = (),
        batch_invariant: bool = False,
    ) -> None:
        """Read the layer's fields; kernels are built by `engine`.

        Args:
            name: of the layer in its model, for errors.
            layer: the RadixAttention.
            dtype: of queries and the output.
            device: where.
            kv_dtype: of the cache; None: dtype.
            tables: custom variants that act on it.
            batch_invariant: a request's result has the same bits in every batch.

        Raises:
            NotImplementedError: the layer computes something that attnloom does not.
        """
        reasons = [reason for wrong, reason in _unserved(layer) if wrong]
        if reasons:
            raise NotImplementedError(f"attnloom cannot serve attention layer {name}: {'; '.join(reasons)}")
        self.name = name
        self.dtype, self.device, self.tables = dtype, device, tables
        self.kv_dtype = kv_dtype or dtype
        self.batch_invariant = batch_invariant
        self.heads: tuple[int, int, int] = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
        self.scale = float(layer.scaling)
        # SGLang's -1 and None are no window; otherwise it counts the keys before a query's own.
        self.reach: int | None = layer.sliding_window_size if (layer.sliding_window_size or -1) > -1 else None
        self.logit_cap: float | None = layer.logit_cap if (layer.logit_cap or 0) > 0 else None
        self.temperature_len: int | None = layer.xai_temperature_len if layer.xai_temperature_len > 0 else None
        self.is_cross = bool(layer.is_cross_attention)
        self.bidirectional = layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL
        self.encoder_only = layer.attn_type == AttentionType.ENCODER_ONLY
        self.engines: dict[tuple[Seen, bool], Attention] = {}
        self._plan_ids: dict[int, Hashable] = {}

    def seen(self, *, extend: bool) -> Seen:
        """Which keys the queries of a step without drafts see."""
        everything = self.is_cross or self.encoder_only or (self.bidirectional and extend)
        return Seen.ALL if everything else Seen.CAUSAL

    def engine(self, seen: Seen, *, sinks: bool) -> Attention:
        """The engine for these queries, compiled or loaded the first time.

        Raises:
            ValueError: from the engine, for heads it has no kernel for; or a custom variant does not go with the layer.
        """
        found = self.engines.get((seen, sinks))
        if found is None:
            num_heads, num_kv_heads, head_dim = self.heads
            found = Attention(
                num_heads,
                num_kv_heads,
                head_dim,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                variant=self._variant(seen, sinks),
                device=self.device,
                batch_invariant=self.batch_invariant,
            )
            self.engines[seen, sinks] = found
        return found

    def params(self, engine: Attention, sinks: Tensor | None, tree: dict[str, Tensor]) -> dict[str, Value]:
        """The run-time parameters of a step's variant that layer and step have."""
        own = layer_params(engine.variant, logit_cap=self.logit_cap, temperature_len=self.temperature_len, sinks=sinks)
        return own | tree

    def plan_id(self, engine: Attention) -> Hashable:
        """Layers with the same one share a plan. One of this layer's engines is asked for."""
        found = self._plan_ids.get(id(engine))
        if found is None:
            found = self._plan_ids[id(engine)] = plan_id(engine, (self.logit_cap, self.temperature_len))
        return found

    def cache_scales(self, layer: Any) -> tuple[float | None, float | None]:
        """What keys and values of an eight-bit cache were divided by; weights that are loaded bring them along."""
        return (None, None) if self.kv_dtype == self.dtype else (layer.k_scale_float, layer.v_scale_float)

    def _variant(self, seen: Seen, sinks: bool) -> Variant:
        visibility: Variant
        if seen is Seen.CAUSAL:
            visibility = variants.Causal() if self.reach is None else variants.SlidingWindow(self.reach + 1)
        else:
            # Windows of bidirectional steps bound what lies before a query only, as in SGLang's own kernels.
            visibility = variants.Full() if self.reach is None else Variant("window_before", left=self.reach)
        if seen is Seen.TREE:
            visibility = visibility & variants.PackedMask()
        score = layer_score(
            soft_cap=self.logit_cap is not None, temperature=self.temperature_len is not None, sinks=sinks
        )
        return layer_variant(visibility, score, self.tables)


def _unserved(layer: Any) -> list[tuple[bool, str]]:
    """What a layer may have that changes its result and is not computed here."""
    capped = (layer.logit_cap or 0) > 0
    return [
        (
            layer.v_head_dim != layer.qk_head_dim,
            f"values of another size than keys ({layer.v_head_dim} and {layer.qk_head_dim}) are not supported yet",
        ),
        (
            layer.qk_head_dim not in HEAD_DIMS,
            f"head size {layer.qk_head_dim} is not supported, only {', '.join(map(str, HEAD_DIMS))}",
        ),
        (
            capped and layer.logit_capping_method != "tanh",
            f'logit_capping_method="{layer.logit_capping_method}" is not supported, only "tanh"',
        ),
        (
            layer.pos_encoding_mode not in (None, "NONE"),
            f'pos_encoding_mode="{layer.pos_encoding_mode}" is not supported, only "NONE"',
        ),
        (
            bool(layer.use_irope),
            "chunked attention of layers with rotary embeddings (use_irope, Llama 4) is not supported yet",
        ),
    ]
