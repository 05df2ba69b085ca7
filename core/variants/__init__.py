"""The catalogue of variants. Each is a few lines over :class:`attnloom.Variant`; compose them with ``&``.

Hooks act left to right: what changes logits stands before what makes weights of them.
"""

from __future__ import annotations

from attnloom.core.variants.logits import (
    ALiBi,
    ALiBiSqrt,
    GrokTemperature,
    HeadTemperature,
    RelativeBias,
    Sigmoid,
    Sinks,
    SoftCap,
    t5_relative_bias,
)
from attnloom.core.variants.pages import select_pages
from attnloom.core.variants.rotary import RoPE, rope_frequencies
from attnloom.core.variants.streaming import StreamingLLM, streaming
from attnloom.core.variants.visibility import (
    Causal,
    ChunkedLocal,
    DocumentMask,
    Full,
    PackedMask,
    PrefixLM,
    SlidingWindow,
    documents,
)

__all__ = [
    "ALiBi",
    "ALiBiSqrt",
    "Causal",
    "ChunkedLocal",
    "DocumentMask",
    "Full",
    "GrokTemperature",
    "HeadTemperature",
    "PackedMask",
    "PrefixLM",
    "RelativeBias",
    "RoPE",
    "Sigmoid",
    "Sinks",
    "SlidingWindow",
    "SoftCap",
    "StreamingLLM",
    "documents",
    "rope_frequencies",
    "select_pages",
    "streaming",
    "t5_relative_bias",
]
