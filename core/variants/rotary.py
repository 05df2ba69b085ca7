"""Rotary position embeddings inside attention: keys lie unrotated in the cache, and positions may be given anew."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attnloom.core.checks import check_above, check_positive
from attnloom.core.variant import Param, Variant

# The partner of `dim` and the frequency of its pair. Dimensions past the rotated ones stay as they are.
_PAIRS = {
    "halves": (
        "const int pair = dim < pairs ? dim : dim - pairs;\n"
        "const bool first = dim < pairs;\n"
        "const int partner = first ? dim + pairs : dim - pairs;\n"
    ),
    "interleaved": "const int pair = dim >> 1;\nconst bool first = (dim & 1) < 1;\nconst int partner = dim ^ 1;\n",
}


def RoPE(
    rotary_dim: int,
    base: float = 10000.0,
    *,
    interleaved: bool = False,
    scaling: Mapping[str, object] | None = None,
) -> Variant:
    """Rotates queries and keys by their logical positions (RoFormer, arXiv 2104.09864).

    Args:
        rotary_dim: how many of the first dimensions are rotated, even, at most head_dim.
        base: of the frequencies, ``rope_theta``.
        interleaved: pairs are neighbours (GPT-J); default: pairs are halves apart (Llama, GPT-NeoX).
        scaling: see :func:`rope_frequencies`.

    Bound parameter: ``rope_frequencies`` float32 ``[rotary_dim / 2]``, radians per position.
    """
    rotate = (
        "const int pairs = params.rope_frequencies.size(0);\n"
        + _PAIRS["interleaved" if interleaved else "halves"]
        + "const float angle = float({position}) * params.rope_frequencies.at(pair);\n"
        "const float other = {vector}[inside(partner, head_dim)];\n"
        "const float turned = {vector}[dim] * cos(angle) + (first ? -other : other) * sin(angle);\n"
        "return dim < 2 * pairs ? turned : {vector}[dim];"
    )
    return Variant(
        "rope_interleaved" if interleaved else "rope",
        (Param("rope_frequencies", shape=("<=head_dim/2",)),),
        query_transform=rotate.format(vector="query", position="q_pos"),
        key_transform=rotate.format(vector="key", position="kv_pos"),
        captures={"rope_frequencies": rope_frequencies(rotary_dim, base, scaling)},
    )


def rope_frequencies(rotary_dim: int, base: float = 10000.0, scaling: Mapping[str, object] | None = None) -> Tensor:
    """Radians per position of each rotated pair, computed in float64.

    Args:
        rotary_dim: dimensions that are rotated, even.
        base: ``rope_theta``.
        scaling: a model's ``rope_scaling``: ``{"rope_type": "linear", "factor": 4.0}`` divides all frequencies (arXiv
            2306.15595); ``{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}`` divides the low ones and blends those between (Llama 3.1).

    Returns:
        float32 ``[rotary_dim / 2]``.

    Raises:
        ValueError: another type of scaling, or one of its numbers is missing.
    """
    check_positive("rotary_dim", rotary_dim)
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim}: expected an even number")
    check_above("base", base, 0)
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"scaling={scaling!r}: expected a mapping, or None")
    frequencies = float(base) ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    if scaling is None:
        return frequencies.float()
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return frequencies.float()
    if kind not in ("linear", "llama3"):
        raise ValueError(f"scaling={dict(scaling)}: expected rope_type linear or llama3")
    factor = _number(scaling, "factor")
    if kind == "linear":
        return (frequencies / factor).float()
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ValueError(f"scaling={dict(scaling)}: expected low_freq_factor below high_freq_factor")
    turns = _number(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (frequencies * (kept + (1.0 - kept) / factor)).float()


def _number(scaling: Mapping[str, object], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"scaling={dict(scaling)}: expected {name}, a number above 0")
    return check_above(f"scaling[{name!r}]", value, 0)
