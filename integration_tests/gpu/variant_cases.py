"""Variants as the engine takes them, each beside what the oracle does for it: hooks alone, together, the catalogue.

The text of a hook and the Python beside it say the same thing twice, on purpose: one is compiled, the other is the
definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnloom import variants
from attnloom.core.masks import pack_masks
from attnloom.core.variant import Param, Variant
from integration_tests.gpu.oracle import At, Hooks
from integration_tests.gpu.storage import DEVICE

Band = tuple[int | None, int | None]
Params = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What parameters depend on. masks: bool `[n, L]` of each request, for packed masks."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    qo_lens: list[int]
    kv_lens: list[int]
    masks: list[Tensor] | None = None

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)


@dataclass(frozen=True)
class VariantCase:
    """A variant, its parameters, and the oracle's hooks with these parameters.

    band: the variant's own, where its mask goes with one; None: it runs under any.
    by_position: its mask is over positions, so that a block mask can be made of it.
    first_read: the first slot that the declared range leaves to queries from a position on.
    """

    variant: Variant
    hooks: Callable[[Shape, Params], Hooks]
    params: Callable[[Shape], Params] = lambda shape: {}
    band: Band | None = None
    by_position: bool = False
    first_read: Callable[[int], int] = lambda position: 0


def partner(vector: Tensor) -> Tensor:
    """vector[dim ^ 1] for every dim, over the last axis."""
    return vector.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def dims(vector: Tensor) -> Tensor:
    return torch.arange(vector.shape[-1], device=vector.device)


def _of_heads(param: Tensor, heads: Tensor) -> Tensor:
    return param.double()[heads]


QUERY = (
    "const float angle = params.rate * float(q_pos) + 0.25f * float(q_head) + 0.125f * float(request + kv_head)"
    " - 0.0625f * float(q_index);\n"
    "return query[dim] * cos(angle) + (dim % 2 == 1 ? 1.0f : -1.0f) * query[dim ^ 1] * sin(angle);"
)
KEY = (
    "return key[dim] * (1.0f + 0.0001f * float(kv_pos)) - 0.25f * float(1 + kv_head % 2) * key[dim ^ 1]"
    " + 0.0625f * float((request + kv_index) % 5);"
)
VALUE = (
    "return value[dim] * params.gain(kv_head, dim) + (kv_pos % 2 == 0 ? 0.5f : -0.5f) * value[dim ^ 1]"
    " + 0.125f * float((request + kv_index) % 3);"
)
LOGITS = (
    "return logits * params.tilt[q_head] + 0.0625f * float(kv_head * (kv_pos % 7)) - 0.001f * float(q_pos - kv_pos)"
    " + 0.25f * float((request + q_index + kv_index) % 3);"
)
MASK = "return (q_pos % 5 != 0) & ((kv_pos + q_head + kv_head) % 3 != request % 3);"
OUTPUT = (
    "return tanh(output[dim]) + 0.0625f * float(q_head % 4) * output[dim ^ 1] + 0.25f * float(kv_head % 3)"
    " + 0.001f * float(q_pos) - 0.125f * float(request + q_index % 2);"
)
SINK = "return params.sinks[q_head] + float(q_pos & 3) - 0.5f * float(request + kv_head) + float(q_index % 2);"

RATE = Param("rate")
GAIN = Param("gain", shape=("num_kv_heads", "head_dim_v"))
TILT = Param("tilt", shape=("num_qo_heads",))
SINKS = Param("sinks", shape=("num_qo_heads",))


def rotate(query: Tensor, at: At) -> Tensor:
    angle = 0.0625 * at.q_pos + 0.25 * at.q_head + 0.125 * (at.request + at.kv_head) - 0.0625 * at.q_index
    sign = torch.where(dims(query) % 2 == 1, 1.0, -1.0)
    return query * angle.double().cos() + sign * partner(query) * angle.double().sin()


def mix_key(key: Tensor, at: At) -> Tensor:
    mixed = key * (1.0 + 0.0001 * at.kv_pos) - 0.25 * (1 + at.kv_head % 2) * partner(key)
    return mixed + 0.0625 * ((at.request + at.kv_index) % 5)


def mix_value(gain: Tensor) -> Callable[[Tensor, At], Tensor]:
    def mix(value: Tensor, at: At) -> Tensor:
        sign = torch.where(at.kv_pos % 2 == 0, 0.5, -0.5)
        return value * gain.double()[:, None] + sign * partner(value) + 0.125 * ((at.request + at.kv_index) % 3)

    return mix


def tilt_logits(tilt: Tensor) -> Callable[[Tensor, At], Tensor]:
    def turn(logits: Tensor, at: At) -> Tensor:
        slanted = logits * _of_heads(tilt, at.q_head) - 0.001 * (at.q_pos - at.kv_pos)
        return slanted + 0.0625 * at.kv_head * (at.kv_pos % 7) + 0.25 * ((at.request + at.q_index + at.kv_index) % 3)

    return turn


def sieve(at: At) -> Tensor:
    return (at.q_pos % 5 != 0) & ((at.kv_pos + at.q_head + at.kv_head) % 3 != at.request % 3)


def squash(output: Tensor, at: At) -> Tensor:
    turned = torch.tanh(output) + 0.0625 * (at.q_head % 4) * partner(output) + 0.25 * (at.kv_head % 3)
    return turned + 0.001 * at.q_pos - 0.125 * (at.request + at.q_index % 2)


def moving_sink(sinks: Tensor) -> Callable[[At], Tensor]:
    return lambda at: _of_heads(sinks, at.q_head) + (at.q_pos & 3) - 0.5 * (at.request + at.kv_head) + at.q_index % 2


def _softmax_of_all(shape: Shape) -> Params:
    return {**_tilt(shape), **_gain(shape), **_sinks(shape), "rate": 0.0625}


def _gain(shape: Shape) -> Params:
    return {"gain": 1.0 + 0.25 * shape.randn(shape.num_kv_heads, shape.head_dim)}


def _tilt(shape: Shape) -> Params:
    return {"tilt": shape.randn(shape.num_qo_heads).clamp(-1.5, 1.5)}


def _sinks(shape: Shape) -> Params:
    return {"sinks": 2.0 * shape.randn(shape.num_qo_heads)}


def _squash_sigmoid(tilt: Tensor) -> Callable[[Tensor, At], Tensor]:
    return lambda logits, at: torch.sigmoid(tilt_logits(tilt)(logits, at) - 1.5)


ALL = dict(query_transform=QUERY, key_transform=KEY, value_transform=VALUE, logits_mask=MASK, output_transform=OUTPUT)

HOOKS = {
    "query": VariantCase(
        Variant("gpu_query", (RATE,), query_transform=QUERY),
        lambda shape, params: Hooks(query=rotate),
        lambda shape: {"rate": 0.0625},
    ),
    "key": VariantCase(Variant("gpu_key", key_transform=KEY), lambda shape, params: Hooks(key=mix_key)),
    "value": VariantCase(
        Variant("gpu_value", (GAIN,), value_transform=VALUE),
        lambda shape, params: Hooks(value=mix_value(params["gain"])),
        _gain,
    ),
    "logits": VariantCase(
        Variant("gpu_logits", (TILT,), logits_transform=LOGITS),
        lambda shape, params: Hooks(logits=tilt_logits(params["tilt"]), logits_slope=1.5),
        _tilt,
    ),
    "mask": VariantCase(
        Variant("gpu_mask", logits_mask=MASK), lambda shape, params: Hooks(mask=sieve), by_position=True
    ),
    "output": VariantCase(
        Variant("gpu_output", output_transform=OUTPUT), lambda shape, params: Hooks(output=squash, output_slope=1.2)
    ),
    "sink": VariantCase(
        Variant("gpu_sink", (SINKS,), sink=SINK),
        lambda shape, params: Hooks(sink=moving_sink(params["sinks"])),
        _sinks,
    ),
    "no softmax": VariantCase(Variant("gpu_linear", use_softmax=False), lambda shape, params: Hooks(softmax=False)),
}
"""Each hook alone."""

TOGETHER = {
    "all": VariantCase(
        Variant("gpu_all", (RATE, GAIN, TILT, SINKS), logits_transform=LOGITS, sink=SINK, **ALL),
        lambda shape, params: Hooks(
            rotate,
            mix_key,
            mix_value(params["gain"]),
            tilt_logits(params["tilt"]),
            sieve,
            squash,
            moving_sink(params["sinks"]),
            logits_slope=1.5,
            output_slope=1.2,
        ),
        _softmax_of_all,
        by_position=True,
    ),
    "all, no softmax": VariantCase(
        Variant(
            "gpu_all_sigmoid",
            (RATE, GAIN, TILT),
            logits_transform=LOGITS.replace("return ", "return sigmoid(-1.5f + ").replace(";", ");"),
            use_softmax=False,
            **ALL,
        ),
        lambda shape, params: Hooks(
            rotate,
            mix_key,
            mix_value(params["gain"]),
            _squash_sigmoid(params["tilt"]),
            sieve,
            squash,
            softmax=False,
            logits_slope=0.4,
            output_slope=1.2,
        ),
        lambda shape: {**_tilt(shape), **_gain(shape), "rate": 0.0625},
        by_position=True,
    ),
}
"""All seven hooks together, with a sink, and without softmax."""


def positional(text: str) -> str:
    """A hook that looks at positions and heads only: what else it would look at is 0."""
    return re.sub(r"\b(request|q_index|kv_index)\b", "0", text)


def _at_positions(hook: Any) -> Any:
    """The same of the oracle's."""

    def called(*arguments: Any) -> Any:
        at = arguments[-1]
        here = replace(at, request=0, q_index=torch.zeros_like(at.q_index), kv_index=torch.zeros_like(at.kv_index))
        return hook(*arguments[:-1], here)

    return called


def _all_of_positions(shape: Shape, params: Params) -> Hooks:
    hooks = TOGETHER["all"].hooks(shape, params)
    named = {name: getattr(hooks, name) for name in ("query", "key", "value", "logits", "mask", "output", "sink")}
    return replace(hooks, **{name: _at_positions(hook) for name, hook in named.items()})


POSITIONAL = {
    "all, of positions": VariantCase(
        Variant(
            "gpu_all_positions",
            (RATE, GAIN, TILT, SINKS),
            logits_transform=positional(LOGITS),
            sink=positional(SINK),
            **{hook: positional(text) for hook, text in ALL.items()},
        ),
        _all_of_positions,
        _softmax_of_all,
        by_position=True,
    )
}
"""All seven hooks with a sink, over positions: for the batch_invariant mode."""

CAP = 5.0


def _capped(slopes: Tensor) -> Callable[[Tensor, At], Tensor]:
    return lambda logits, at: CAP * torch.tanh(logits / CAP) + _of_heads(slopes, at.q_head) * (at.kv_pos - at.q_pos)


def _slopes(shape: Shape) -> Params:
    return {"alibi_slopes": 0.1 * torch.rand(shape.num_qo_heads, device=DEVICE)}


def turn(interleaved: bool, rotary_dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    """RoPE with the base 10000 in float64: (vectors [heads, rows, dim], positions [1, rows, 1])."""

    def rotated(vector: Tensor, positions: Tensor) -> Tensor:
        # The parameter is float32: so are the frequencies, here as well.
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=vector.device) / rotary_dim
        angle = positions.double() * (10000.0**-exponents).float().double()
        cos, sin = angle.cos(), angle.sin()
        head, rest = vector[..., :rotary_dim], vector[..., rotary_dim:]
        a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
        pair = (a * cos - b * sin, b * cos + a * sin)
        return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)

    return rotated


def _rope(rotary_dim: int, *, interleaved: bool = False) -> VariantCase:
    rotated = turn(interleaved, rotary_dim)
    return VariantCase(
        variants.RoPE(rotary_dim, interleaved=interleaved),
        lambda shape, params: Hooks(
            query=lambda query, at: rotated(query, at.q_pos), key=lambda key, at: rotated(key, at.kv_pos)
        ),
    )


def _documents(shape: Shape) -> Params:
    """Documents of 90 tokens, and a last one; every third request holds one more token than documents do."""
    rows = []
    for request, length in enumerate(shape.kv_lens):
        inside = max(length - (request % 3 == 2), 1)
        rows.append([90] * (inside // 90) + [inside % 90] * (inside % 90 > 0))
    return dict(variants.documents(rows, device=DEVICE))


def _of_a_document(shape: Shape) -> Callable[[At], Tensor]:
    def seen(at: At) -> Tensor:
        length = shape.kv_lens[at.request]
        inside = max(length - (at.request % 3 == 2), 1)
        same = torch.div(at.q_pos, 90, rounding_mode="floor") == torch.div(at.kv_pos, 90, rounding_mode="floor")
        return same & (at.q_pos >= 0) & (at.q_pos < inside) & (at.kv_pos < inside)

    return seen


def _prefixes(shape: Shape) -> Params:
    lengths = [length // 3 for length in shape.kv_lens]
    return {"prefix_lengths": torch.tensor(lengths, dtype=torch.int32, device=DEVICE)}


def packed_from(mask: Tensor) -> int:
    """Keys before it take no bits: every query sees them."""
    return mask.shape[1] // 2


def _packed(shape: Shape) -> Params:
    assert shape.masks is not None
    begins = [packed_from(mask) for mask in shape.masks]
    return pack_masks([mask[:, begin:] for mask, begin in zip(shape.masks, begins, strict=True)], begins, device=DEVICE)


def _unpacked(shape: Shape) -> Hooks:
    masks = shape.masks
    assert masks is not None
    return Hooks(mask=lambda at: masks[at.request][None])


CHUNK = 150

CATALOGUE = {
    "cap, alibi, sinks": VariantCase(
        variants.SoftCap() & variants.ALiBi() & variants.Sinks(),
        lambda shape, params: Hooks(
            logits=_capped(params["alibi_slopes"]), sink=lambda at: _of_heads(params["sinks"], at.q_head)
        ),
        lambda shape: {"logit_cap": CAP, **_slopes(shape), **_sinks(shape)},
    ),
    "rope": _rope(64),
    "rope, interleaved": _rope(48, interleaved=True),
    "sigmoid": VariantCase(
        variants.Sigmoid(-1.0),
        lambda shape, params: Hooks(
            logits=lambda logits, at: torch.sigmoid(logits - 1.0), softmax=False, logits_slope=0.25
        ),
    ),
    "chunks": VariantCase(
        variants.ChunkedLocal(CHUNK),
        lambda shape, params: Hooks(mask=lambda at: at.kv_pos >= at.q_pos - at.q_pos % CHUNK),
        band=(CHUNK - 1, 0),
        by_position=True,
        first_read=lambda position: max(position, 0) // CHUNK * CHUNK,
    ),
    "prefix": VariantCase(
        variants.PrefixLM(),
        lambda shape, params: Hooks(
            mask=lambda at: (at.kv_pos <= at.q_pos) | (at.kv_pos < int(params["prefix_lengths"][at.request]))
        ),
        _prefixes,
        band=(None, None),
        by_position=True,
    ),
    "documents": VariantCase(
        variants.DocumentMask(),
        lambda shape, params: Hooks(mask=_of_a_document(shape)),
        _documents,
        band=(None, None),
        by_position=True,
    ),
    "packed mask": VariantCase(variants.PackedMask(), lambda shape, params: _unpacked(shape), _packed),
    "local and first": VariantCase(
        Variant("gpu_local", logits_mask="return (abs(q_pos - kv_pos) < 70) | (kv_pos < 3);"),
        lambda shape, params: Hooks(mask=lambda at: ((at.q_pos - at.kv_pos).abs() < 70) | (at.kv_pos < 3)),
        by_position=True,
    ),
}

PLAIN = VariantCase(Variant("plain"), lambda shape, params: Hooks())
VARIANTS = {"plain": PLAIN, **HOOKS, **TOGETHER, **POSITIONAL, **CATALOGUE}
