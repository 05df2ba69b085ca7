"""Variants as the engine takes them, each beside what the oracle does for it.

One case per hook, written to use every index the hook is given, then the catalogue and its compositions. The text of a
hook and the Python beside it say the same thing twice, on purpose: one is compiled, the other is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attnloom import variants
from attnloom.core.variant import Param, Variant
from tests.oracle import Array, At, Band, Hooks

Params = dict[str, Any]
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64


@dataclass(frozen=True)
class Case:
    """A variant, the parameters to run it with, and the oracle's hooks and band. Heads: 6 over 2, head size 64.

    slope: bound of the sum over dimensions of |d output_transform / d output|, by which it may magnify an error.
    """

    variant: Variant
    hooks: Hooks
    params: Params = field(default_factory=dict)
    band: Band = Band(None, 0)
    slope: float = 1.0


def _causal(name: str, *params: Param, **hooks: Any) -> Variant:
    return Variant(name, params, right=0, **hooks)


def _partner(vector: Array) -> Array:
    """vector[dim ^ 1] for every dim, over the last axis."""
    return vector.reshape(*vector.shape[:-1], -1, 2)[..., ::-1].reshape(vector.shape)


def _dims(vector: Array) -> Array:
    return np.arange(vector.shape[-1])


def _tensor(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


_RATE = 0.0625
_GAIN = _tensor(NUM_KV_HEADS, HEAD_DIM, seed=1)
_SLOPES = _tensor(NUM_QO_HEADS, seed=2).abs() * 0.1
_SINKS = _tensor(NUM_QO_HEADS, seed=3, scale=2.0)
_FADES = _tensor(512, seed=5)
_TILT = _tensor(NUM_QO_HEADS, seed=4)


def _rotate(query: Array, at: At) -> Array:
    assert at.q_pos is not None
    angle = _RATE * at.q_pos + 0.25 * at.q_head + 0.125 * at.request
    sign = np.where(_dims(query) % 2 == 1, 1.0, -1.0)
    return query * np.cos(angle) + sign * _partner(query) * np.sin(angle)


QUERY = Case(
    _causal(
        "test_query",
        Param("rate"),
        query_transform=(
            "const float angle = params.rate * float(q_pos) + 0.25f * float(q_head) + 0.125f * float(request);\n"
            "return query[dim] * cos(angle) + (dim % 2 == 1 ? 1.0f : -1.0f) * query[dim ^ 1] * sin(angle);"
        ),
    ),
    Hooks(query_transform=_rotate),
    {"rate": _RATE},
)


def _mix_key(key: Array, at: At) -> Array:
    assert at.kv_pos is not None
    return key * (1.0 + at.kv_pos / 512.0) - 0.5 * at.kv_head * _partner(key) + 0.25 * at.request


KEY = Case(
    _causal(
        "test_key",
        key_transform=(
            "return key[dim] * (1.0f + float(kv_pos) / 512.0f) - 0.5f * float(kv_head) * key[dim ^ 1]"
            " + 0.25f * float(request);"
        ),
    ),
    Hooks(key_transform=_mix_key),
)


def _fade_key(key: Array, at: At) -> Array:
    assert at.kv_index is not None
    fades = _FADES.double().numpy()
    return key * fades[at.kv_index] + fades[at.kv_head] * _partner(key)


KEY_BY_TOKEN = Case(
    _causal(
        "test_key_by_token",
        Param("fades", shape=(None,)),
        key_transform="return key[dim] * params.fades.at(kv_index) + params.fades[kv_head] * key[dim ^ 1];",
    ),
    Hooks(key_transform=_fade_key),
    {"fades": _FADES},
)
"""Looks up by the token, which the other loop over a tile's keys is for."""


def _mix_value(value: Array, at: At) -> Array:
    assert at.kv_pos is not None
    gain = _GAIN.double().numpy()[at.kv_head]
    return value * gain + np.where(at.kv_pos % 2 == 0, 0.5, -0.5) * _partner(value) + at.request


VALUE = Case(
    _causal(
        "test_value",
        Param("gain", shape=("num_kv_heads", "head_dim_v")),
        value_transform=(
            "return value[dim] * params.gain(kv_head, dim) + (kv_pos % 2 == 0 ? 0.5f : -0.5f) * value[dim ^ 1]"
            " + float(request);"
        ),
    ),
    Hooks(value_transform=_mix_value),
    {"gain": _GAIN},
)


def _tilt_logits(logits: Array, at: At) -> Array:
    tilt = float(_TILT[at.q_head])
    return logits * tilt + 0.0625 * at.kv_head * (at.kv_pos % 7) - 0.03125 * (at.q_pos - at.kv_pos) + at.request


LOGITS = Case(
    _causal(
        "test_logits",
        Param("tilt", shape=("num_qo_heads",)),
        logits_transform=(
            "return logits * params.tilt[q_head] + 0.0625f * float(kv_head * (kv_pos % 7))"
            " - 0.03125f * float(q_pos - kv_pos) + float(request);"
        ),
    ),
    Hooks(logits_transform=_tilt_logits),
    {"tilt": _TILT},
)


def _sieve(at: At) -> Array:
    return (at.q_pos % 5 != 0) & ((at.kv_pos + at.q_head + at.kv_head) % 3 != at.request % 3)


MASK = Case(
    _causal(
        "test_mask",
        logits_mask="return (q_pos % 5 != 0) & ((kv_pos + q_head + kv_head) % 3 != request % 3);",
    ),
    Hooks(logits_mask=_sieve),
)


def _squash(output: Array, at: At) -> Array:
    assert at.q_pos is not None
    return np.tanh(output) + 0.125 * at.q_head * _partner(output) + 0.5 * at.kv_head + at.q_pos / 256.0 - at.request


OUTPUT = Case(
    _causal(
        "test_output",
        output_transform=(
            "return tanh(output[dim]) + 0.125f * float(q_head) * output[dim ^ 1] + 0.5f * float(kv_head)"
            " + float(q_pos) / 256.0f - float(request);"
        ),
    ),
    Hooks(output_transform=_squash),
    slope=1.625,
)


def _moving_sink(at: At) -> Array:
    assert at.q_pos is not None
    return float(_SINKS[at.q_head]) + (at.q_pos & 3) - at.request + at.kv_head


SINK = Case(
    _causal(
        "test_sink",
        Param("sinks", shape=("num_qo_heads",)),
        sink="return params.sinks[q_head] + float(q_pos & 3) - float(request) + float(kv_head);",
    ),
    Hooks(sink=_moving_sink),
    {"sinks": _SINKS},
)

LINEAR = Case(_causal("test_linear", use_softmax=False), Hooks(use_softmax=False))

SIGMOID = Case(
    _causal(
        "test_sigmoid",
        Param("bias"),
        logits_transform="return sigmoid(logits + params.bias);",
        use_softmax=False,
    ),
    Hooks(logits_transform=lambda logits, at: 1.0 / (1.0 + np.exp(-(logits - 1.5))), use_softmax=False),
    {"bias": -1.5},
)

HOOKS = {
    "query_transform": QUERY,
    "key_transform": KEY,
    "key_transform by token": KEY_BY_TOKEN,
    "value_transform": VALUE,
    "logits_transform": LOGITS,
    "logits_mask": MASK,
    "output_transform": OUTPUT,
    "sink": SINK,
    "use_softmax": LINEAR,
    "sigmoid": SIGMOID,
}

CAP = 5.0


def _soft_cap(logits: Array, at: At) -> Array:
    return CAP * np.tanh(logits / CAP)


def _alibi(logits: Array, at: At) -> Array:
    return logits + float(_SLOPES[at.q_head]) * (at.kv_pos - at.q_pos)


def _fixed_sink(at: At) -> float:
    return float(_SINKS[at.q_head])


SOFT_CAP = Case(variants.Causal() & variants.SoftCap(), Hooks(logits_transform=_soft_cap), {"logit_cap": CAP})
ALIBI = Case(variants.Causal() & variants.ALiBi(), Hooks(logits_transform=_alibi), {"alibi_slopes": _SLOPES})

STATEFUL = Case(
    variants.Causal()
    & variants.Sinks()
    & Variant("test_doubled", output_transform="return 2.0f * output[dim] + 1.0f;"),
    Hooks(sink=_fixed_sink, output_transform=lambda output, at: 2.0 * output + 1.0),
    {"sinks": _SINKS},
    slope=2.0,
)

CHAIN = Case(
    _causal(
        "test_first",
        query_transform="return query[dim] + 0.5f * query[dim ^ 1];",
        key_transform="return key[dim] + 0.5f * key[dim ^ 1];",
        value_transform="return value[dim] + float(kv_head);",
        logits_transform="return logits + 1.0f;",
        output_transform="return output[dim] + 0.5f * output[dim ^ 1];",
    )
    & Variant(
        "test_second",
        (Param("slope"),),
        query_transform="return query[dim ^ 2] * float(1 + dim % 3);",
        key_transform="return key[dim ^ 2] * (dim % 2 == 0 ? 1.0f : -0.5f);",
        value_transform="return value[dim] * value[dim ^ 1];",
        logits_transform="return logits * params.slope;",
        output_transform="return output[dim] * float(1 + dim % 2);",
    ),
    Hooks(
        query_transform=lambda q, at: _swap_pairs(q + 0.5 * _partner(q)) * (1 + _dims(q) % 3),
        key_transform=lambda k, at: _swap_pairs(k + 0.5 * _partner(k)) * np.where(_dims(k) % 2 == 0, 1.0, -0.5),
        value_transform=lambda v, at: (v + at.kv_head) * _partner(v + at.kv_head),
        logits_transform=lambda logits, at: (logits + 1.0) * 0.75,
        output_transform=lambda o, at: (o + 0.5 * _partner(o)) * (1 + _dims(o) % 2),
    ),
    {"slope": 0.75},
    slope=3.0,
)


def _swap_pairs(vector: Array) -> Array:
    """vector[dim ^ 2] for every dim."""
    return vector.reshape(*vector.shape[:-1], -1, 2, 2)[..., ::-1, :].reshape(vector.shape)


ALL_OF_THE_CATALOGUE = (
    variants.Causal()
    & variants.SoftCap()
    & variants.ALiBi()
    & variants.Sinks()
    & variants.SlidingWindow(90)
    & variants.PackedMask()
)

CHUNKED = variants.Causal() & variants.ChunkedLocal(150)
"""Declares its ranges."""

LOCAL_AND_FIRST = _causal("test_local_and_first", logits_mask="return (abs(q_pos - kv_pos) < 70) | (kv_pos < 3);")
"""Declares no range."""

INVARIANT = {
    "query_transform": _causal(
        "test_turn", query_transform="return query[dim] + 0.01f * float(q_pos) * query[dim ^ 1];"
    ),
    "key_transform": _causal("test_gain", key_transform="return key[dim] * (1.0f + float(kv_pos) / 512.0f);"),
    "key_transform by column": _causal(
        "test_shear", key_transform="return key[dim] + 0.01f * float(kv_pos) * key[dim ^ 1];"
    ),
    "value_transform": _causal("test_mix", value_transform="return value[dim] + float(kv_pos % 3) * value[dim ^ 1];"),
    "logits_transform": _causal(
        "test_slope", logits_transform="return logits * 0.75f - 0.03125f * float(q_pos - kv_pos) * float(1 + q_head);"
    ),
    "logits_mask": _causal("test_sieve", logits_mask="return (q_pos % 5 != 0) & ((kv_pos + q_head) % 3 != 0);"),
    "output_transform": _causal(
        "test_bend", output_transform="return tanh(output[dim]) + 0.125f * output[dim ^ 1] + float(q_pos) / 256.0f;"
    ),
    "no softmax": SIGMOID.variant,
    "catalogue": (
        variants.Causal() & variants.SoftCap() & variants.ALiBi() & variants.Sinks() & variants.SlidingWindow(190)
    ),
}
"""Variants over positions and heads, for the batch_invariant mode."""

INVARIANT_PARAMS: dict[str, Params] = {
    "no softmax": SIGMOID.params,
    "catalogue": {"logit_cap": CAP, "alibi_slopes": _SLOPES, "sinks": _SINKS},
}

FUNCTIONS: tuple[str, ...] = (
    "exp(x)",
    "exp2(x)",
    "expm1(x)",
    "log(abs(x))",
    "log2(abs(x))",
    "log1p(abs(x))",
    "tanh(x)",
    "sigmoid(x)",
    "erf(x)",
    "sqrt(abs(x))",
    "sin(x)",
    "cos(x)",
    "pow(abs(x), 1.5f)",
    "floor(x)",
    "ceil(x)",
    "trunc(x)",
    "round(x)",
    "sign(x)",
    "min(x, 0.25f)",
    "max(x, 0.25f)",
    "minimum(x, 0.25f)",
    "maximum(x, 0.25f)",
    "where(x > 0.5f, 2.0f, x)",
    "float(abs(q_index - 3)) + x",
    "float(floor_div(q_index - 50, 7))",
    "float(floor_mod(q_index - 50, -7))",
)
"""What a hook may call, each of the logit x."""

DIALECT = Variant(
    "test_functions",
    (Param("which", torch.int64),),
    logits_transform="const float x = logits;\n"
    + "\n".join(f"if (params.which == {i}) return {text};" for i, text in enumerate(FUNCTIONS))
    + "\nreturn x;",
    use_softmax=False,
)
