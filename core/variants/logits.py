"""What is done to the logits, and what becomes of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnloom.core.checks import check_above, check_positive, check_scale, check_tensor
from attnloom.core.variant import Param, Variant


def SoftCap(cap: float | None = None) -> Variant:
    """``logit_cap * tanh(logits / logit_cap)`` (Gemma 2, arXiv 2408.00118; Grok-1, with the cap 30).

    The logits are scaled before: Gemma's ``query_pre_attn_scalar ** -0.5`` and Grok's ``attn_output_multiplier`` are
    the ``sm_scale`` of run(). Parameter: float ``logit_cap`` > 0, bound to ``cap`` if given.
    """
    return Variant(
        "soft_cap",
        (Param("logit_cap", above=0),),
        logits_transform="return params.logit_cap * tanh(logits / params.logit_cap);",
        captures={} if cap is None else {"logit_cap": check_above("cap", cap, 0)},
    )


def GrokTemperature(length: int | None = None) -> Variant:
    """Logits of queries at positions beyond a length grow with the logarithm: ``* log2(q_pos) / log2(length)``.

    Grok's ``attn_temperature_len``, in SGLang ``xai_temperature_len``, whose kernels apply it after the cap:
    ``SoftCap() & GrokTemperature()``. Parameter: int64 ``temperature_len`` > 1, bound to ``length`` if given.
    """
    return Variant(
        "grok_temperature",
        (Param("temperature_len", torch.int64, above=1),),
        logits_transform=(
            "const float length = float(params.temperature_len);\n"
            "return logits * where(float(q_pos) > length, log2(float(q_pos)) / log2(length), 1.0f);"
        ),
        captures={} if length is None else {"temperature_len": _length(length)},
    )


def _length(length: int) -> int:
    """The logarithm of 1 is 0, by which nothing is divided."""
    if check_positive("length", length) == 1:
        raise ValueError("length=1: expected at least 2")
    return length


def ALiBi() -> Variant:
    """Adds ``slope * (kv_pos - q_pos)`` (arXiv 2108.12409). Parameter: ``alibi_slopes`` float32 ``[num_qo_heads]``."""
    return Variant(
        "alibi",
        (Param("alibi_slopes", shape=("num_qo_heads",)),),
        logits_transform="return logits + params.alibi_slopes[q_head] * float(kv_pos - q_pos);",
    )


def ALiBiSqrt() -> Variant:
    """Subtracts ``slope * sqrt(q_pos - kv_pos)`` from keys before the query (Step-Audio; vLLM's ``use_alibi_sqrt``).

    Parameter: ``alibi_slopes`` float32 ``[num_qo_heads]``.
    """
    return Variant(
        "alibi_sqrt",
        (Param("alibi_slopes", shape=("num_qo_heads",)),),
        logits_transform="return logits - params.alibi_slopes[q_head] * sqrt(float(max(q_pos - kv_pos, 0)));",
    )


def RelativeBias() -> Variant:
    """Adds a learned bias per head and distance; distances beyond the table read its ends (Shaw, arXiv 1803.02155).

    Parameter: ``relative_bias`` float32 ``[num_qo_heads, 2 * reach + 1]``, column ``reach + kv_pos - q_pos``. T5's
    buckets become such a table by :func:`t5_relative_bias`.
    """
    return Variant(
        "relative_bias",
        (Param("relative_bias", shape=("num_qo_heads", None)),),
        logits_transform=(
            "const int reach = params.relative_bias.size(1) / 2;\n"
            "return logits + params.relative_bias.at(q_head, reach + max(-reach, min(kv_pos - q_pos, reach)));"
        ),
    )


def t5_relative_bias(weight: Tensor, max_distance: int = 128, *, bidirectional: bool = False) -> Tensor:
    """T5's bias by buckets of distances (arXiv 1910.10683) as the parameter of :func:`RelativeBias`.

    Args:
        weight: floating ``[num_buckets, num_heads]``, the model's ``relative_attention_bias.weight``.
        max_distance: from there on distances share a bucket, ``relative_attention_max_distance``.
        bidirectional: as encoders have it: half of the buckets are for keys after the query.

    Returns:
        float32 ``[num_heads, 2 * max_distance + 1]``.
    """
    check_tensor("weight", weight, ndim=2)
    check_positive("max_distance", max_distance)
    distance = torch.arange(-max_distance, max_distance + 1, device=weight.device)
    buckets = weight.shape[0] // 2 if bidirectional else weight.shape[0]
    first = (distance > 0) * buckets if bidirectional else torch.zeros_like(distance)
    back = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = buckets // 2
    grown = torch.log(back.clamp(min=1) / exact) / math.log(max_distance / exact) * (buckets - exact)
    bucket = first + torch.where(back < exact, back, (exact + grown.long()).clamp(max=buckets - 1))
    return weight.detach().float()[bucket].T.contiguous()


def HeadTemperature() -> Variant:
    """Divides the logits by a learned temperature per head (XCiT, arXiv 2106.09681; Swin v2, 2111.09883).

    Parameter: ``temperature`` float32 ``[num_qo_heads]``.
    """
    return Variant(
        "head_temperature",
        (Param("temperature", shape=("num_qo_heads",)),),
        logits_transform="return logits / params.temperature[q_head];",
    )


def Sigmoid(bias: float | None = None) -> Variant:
    """Weights are ``sigmoid(logits + sigmoid_bias)`` and nothing is normalised (arXiv 2409.04431, which takes -log(n)).

    What changes logits comes before it: ``ALiBi() & Sigmoid()``. Parameter: float ``sigmoid_bias``, bound to ``bias``
    if given.
    """
    return Variant(
        "sigmoid",
        (Param("sigmoid_bias"),),
        logits_transform="return sigmoid(logits + params.sigmoid_bias);",
        use_softmax=False,
        captures={} if bias is None else {"sigmoid_bias": check_scale("bias", bias)},
    )


def Sinks() -> Variant:
    """A learned logit per head that takes weight and has no value (gpt-oss, arXiv 2508.10925).

    Parameter: ``sinks`` float32 ``[num_qo_heads]``.
    """
    return Variant("sinks", (Param("sinks", shape=("num_qo_heads",)),), sink="return params.sinks[q_head];")
