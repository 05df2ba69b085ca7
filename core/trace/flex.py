"""Variants from the functions that FlexAttention takes (PyTorch, arXiv 2412.05496)."""

from __future__ import annotations

import re
from collections.abc import Callable

from attnloom.core.trace.captures import identifier
from attnloom.core.trace.tracer import TracedHook, trace
from attnloom.core.variant import Variant


def score_mod(function: Callable[..., object], name: str | None = None) -> Variant:
    """A variant that changes scores as FlexAttention's ``score_mod`` does.

    What the function does is computed as torch does, integers in their types, but for these:
        - Floats are float32, also those that are float64, float16 or bfloat16 in torch, captured or converted.
        - A float that no integer of the type is near becomes some integer of it; torch leaves that undefined too.
        - Integers divided by 0 are some number, and ``x // y`` of floats is NaN for an infinite y of another sign.
        - An index outside a captured tensor reads NaN, 0 or false, where torch raises an error.

    Args:
        function: ``(score, b, h, q_idx, kv_idx) -> score``: the scaled product (float32), request, query head, and the
            logical positions of query and key. Tensors that it captures become parameters, numbers constants.
        name: of the variant; None: the function's.

    Raises:
        TraceError: a line of the function has no translation; the message shows it and says what to write.
    """
    traced = trace("logits_transform", function, flex=True)
    return Variant(
        _name(function, name, "score_mod"), traced.params, logits_transform=_texts(traced), captures=traced.captures
    )


def mask_mod(function: Callable[..., object], name: str | None = None) -> Variant:
    """A variant that hides keys as FlexAttention's ``mask_mod`` does.

    Args:
        function: ``(b, h, q_idx, kv_idx) -> bool``, true where the key is visible; see :func:`score_mod`.
        name: of the variant; None: the function's.

    Raises:
        TraceError: a line of the function has no translation; the message shows it and says what to write.
    """
    traced = trace("logits_mask", function, flex=True)
    return Variant(
        _name(function, name, "mask_mod"), traced.params, logits_mask=_texts(traced), captures=traced.captures
    )


def _texts(traced: TracedHook) -> tuple[str, ...]:
    return () if traced.text is None else (traced.text,)


def _name(function: object, name: str | None, fallback: str) -> str:
    if name is not None:
        return name
    found = getattr(function, "__name__", "")
    return identifier(found) if re.search(r"[A-Za-z]", found) and "<" not in found else fallback
