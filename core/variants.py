"""The catalogue of variants. Each is a few lines over :class:`attnloom.Variant`; compose them with ``&``."""

from __future__ import annotations

import torch

from attnloom.core.checks import check_positive
from attnloom.core.variant import Param, Variant


def Causal() -> Variant:
    """A query sees the keys up to its own position; the last query is at the last key (Vaswani et al., 2017)."""
    return Variant("causal", right=0)


def Full() -> Variant:
    """Every query sees every key, as in encoders and cross attention."""
    return Variant("full")


def SlidingWindow(window: int, *, symmetric: bool = False) -> Variant:
    """A query sees ``window`` keys, its own included: those before it (Mistral 7B, arXiv 2310.06825).

    ``symmetric``: also ``window - 1`` keys after it, as encoders with local attention have it (ModernBERT).
    """
    check_positive("window", window)
    return Variant("sliding_window", left=window - 1, right=window - 1 if symmetric else 0)


def SoftCap() -> Variant:
    """``logit_cap * tanh(logits / logit_cap)`` (Gemma 2, arXiv 2408.00118). Parameter: float ``logit_cap`` > 0."""
    return Variant(
        "soft_cap",
        (Param("logit_cap"),),
        logits_transform="return params.logit_cap * tanh(logits / params.logit_cap);",
    )


def ALiBi() -> Variant:
    """Adds ``slope * (kv_pos - q_pos)`` (arXiv 2108.12409). Parameter: ``alibi_slopes`` float32 ``[num_qo_heads]``."""
    return Variant(
        "alibi",
        (Param("alibi_slopes", shape=("num_qo_heads",)),),
        logits_transform="return logits + params.alibi_slopes[q_head] * float(kv_pos - q_pos);",
    )


def Sinks() -> Variant:
    """A learned logit per head that takes weight and has no value (gpt-oss, arXiv 2508.10925).

    Parameter: ``sinks`` float32 ``[num_qo_heads]``.
    """
    return Variant("sinks", (Param("sinks", shape=("num_qo_heads",)),), sink="return params.sinks[q_head];")


def PackedMask() -> Variant:
    """A boolean mask per request, one bit per (query, key), as :func:`attnloom.core.masks.pack_masks` packs it.

    Keys before ``mask_begin[request]`` are visible; on the others decides bit
    ``mask_offset + q_index * mask_columns + (kv_index - mask_begin)``.
    """
    return Variant(
        "packed_mask",
        (
            Param("packed_mask", torch.uint8, (None,)),
            Param("mask_offset", torch.int64, ("num_requests",)),
            Param("mask_begin", torch.int32, ("num_requests",)),
            Param("mask_columns", torch.int32, ("num_requests",)),
        ),
        logits_mask=(
            "const int column = kv_index - params.mask_begin[request];\n"
            "if (column < 0) return true;\n"
            "return packed_bit(params.packed_mask, params.mask_offset[request]"
            " + int64_t(q_index) * params.mask_columns[request] + column);"
        ),
    )
