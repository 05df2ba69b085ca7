"""Each entry of the catalogue once more: its definition in float64 numpy, and how both are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from attnloom import Attention, Variant, variants
from attnloom.core.jit import build
from attnloom.core.kernels import attention_spec
from tests.core.problem import Problem, make_problem
from tests.core.running import strided_out
from tests.core.variant_cases import Case
from tests.oracle import Array, At, Band, Hooks
from tests.tolerance import assert_lse, assert_out

HEADS, KV_HEADS, DIM = 6, 2, 64
QO_LENS, KV_LENS = [1, 12, 150, 3, 2], [300, 12, 170, 1, 0]
EVERYTHING = Band(None, None)
Transform = Callable[[Array, At], Array]


def _rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CHUNK, CAP, GROK_LENGTH, BIAS, REACH = 48, 4.0, 90, -1.25, 37
PREFIXES = torch.tensor([250, 3, 60, 1, 5], dtype=torch.int32)
DOCUMENTS = [[100, 1, 150, 49], [5, 7], [30, 60, 80], [1], []]
SLOPES, TEMPERATURE = _rand(HEADS, seed=1).abs() * 0.3, _rand(HEADS, seed=2).exp()
RELATIVE, SINKS = _rand(HEADS, 2 * REACH + 1, seed=3), _rand(HEADS, seed=4)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def _chunk(at: At) -> Array:
    return at.kv_pos // CHUNK == at.q_pos // CHUNK


def _prefix(at: At) -> Array:
    return (at.kv_pos <= at.q_pos) | (at.kv_pos < int(PREFIXES[at.request]))


def _document(at: At) -> Array:
    bounds = np.cumsum([0, *DOCUMENTS[at.request]])
    number = [np.searchsorted(bounds, positions, side="right") for positions in (at.q_pos, at.kv_pos)]
    inside = (at.q_pos >= 0) & (at.q_pos < bounds[-1])
    return (number[0] == number[1]) & inside


def _soft_cap(logits: Array, at: At) -> Array:
    return CAP * np.tanh(logits / CAP)


def _grok(logits: Array, at: At) -> Array:
    grown = np.log2(np.maximum(at.q_pos, 1)) / np.log2(GROK_LENGTH)
    return logits * np.where(at.q_pos > GROK_LENGTH, grown, 1.0)


def _alibi_sqrt(logits: Array, at: At) -> Array:
    return logits + float(SLOPES[at.q_head]) * np.where(
        at.kv_pos <= at.q_pos, -np.sqrt(np.abs(at.q_pos - at.kv_pos)), 0
    )


def _relative(logits: Array, at: At) -> Array:
    return logits + RELATIVE.double().numpy()[at.q_head][np.clip(at.kv_pos - at.q_pos, -REACH, REACH) + REACH]


def _temperature(logits: Array, at: At) -> Array:
    return logits / float(TEMPERATURE[at.q_head])


def _sigmoid(logits: Array, at: At) -> Array:
    return 1.0 / (1.0 + np.exp(-(logits + BIAS)))


def rotation(frequencies: list[float], *, interleaved: bool) -> Transform:
    """RoPE as its paper defines it: each pair of dimensions is a complex number that is turned."""
    pairs = len(frequencies)

    def rotate(vector: Array, at: At) -> Array:
        positions = at.q_pos if at.kv_pos is None else at.kv_pos
        turn = np.exp(1j * np.asarray(positions, dtype=np.float64) * np.array(frequencies))
        result = vector.copy()
        first, second = (
            (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
            if interleaved
            else (
                slice(0, pairs),
                slice(pairs, 2 * pairs),
            )
        )
        turned = (vector[:, first] + 1j * vector[:, second]) * turn
        result[:, first], result[:, second] = turned.real, turned.imag
        return result

    return rotate


def frequencies(rotary_dim: int, base: float) -> list[float]:
    return [base ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]


def _llama3(frequency: float) -> float:
    """As the published Llama 3.1 scales one frequency."""
    original, factor, low, high = 128, 8.0, 1.0, 4.0
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


HALVES = rotation([_llama3(f) for f in frequencies(DIM, 500.0)], interleaved=False)
NEIGHBOURS = rotation([f / 2.5 for f in frequencies(48, 10000.0)], interleaved=True)
CAUSAL = variants.Causal()
CASES: dict[str, Case] = {
    "chunked local": Case(variants.ChunkedLocal(CHUNK), Hooks(logits_mask=_chunk)),
    "prefix LM": Case(variants.PrefixLM(), Hooks(logits_mask=_prefix), {"prefix_lengths": PREFIXES}, EVERYTHING),
    "documents": Case(variants.DocumentMask(), Hooks(logits_mask=_document), variants.documents(DOCUMENTS), EVERYTHING),
    "causal documents": Case(
        CAUSAL & variants.DocumentMask(), Hooks(logits_mask=_document), variants.documents(DOCUMENTS)
    ),
    "soft cap, temperature (Grok)": Case(
        CAUSAL & variants.SoftCap() & variants.GrokTemperature(GROK_LENGTH),
        Hooks(logits_transform=lambda logits, at: _grok(_soft_cap(logits, at), at)),
        {"logit_cap": CAP},
    ),
    "ALiBi, square root": Case(
        CAUSAL & variants.ALiBiSqrt(), Hooks(logits_transform=_alibi_sqrt), {"alibi_slopes": SLOPES}
    ),
    "relative bias": Case(
        variants.RelativeBias(), Hooks(logits_transform=_relative), {"relative_bias": RELATIVE}, EVERYTHING
    ),
    "temperature per head": Case(
        CAUSAL & variants.HeadTemperature(), Hooks(logits_transform=_temperature), {"temperature": TEMPERATURE}
    ),
    "sigmoid": Case(CAUSAL & variants.Sigmoid(BIAS), Hooks(logits_transform=_sigmoid, use_softmax=False)),
    "RoPE, halves, llama3": Case(
        CAUSAL & variants.RoPE(DIM, 500.0, scaling=LLAMA3), Hooks(query_transform=HALVES, key_transform=HALVES)
    ),
    "RoPE, interleaved, linear, 48 of 64": Case(
        CAUSAL & variants.RoPE(48, interleaved=True, scaling={"type": "linear", "factor": 2.5}),
        Hooks(query_transform=NEIGHBOURS, key_transform=NEIGHBOURS),
    ),
    "everything that composes": Case(
        variants.ChunkedLocal(CHUNK)
        & variants.RoPE(DIM, 500.0, scaling=LLAMA3)
        & variants.HeadTemperature()
        & variants.SoftCap(CAP)
        & variants.RelativeBias()
        & variants.DocumentMask()
        & variants.Sinks(),
        Hooks(
            query_transform=HALVES,
            key_transform=HALVES,
            logits_transform=lambda logits, at: _relative(_soft_cap(_temperature(logits, at), at), at),
            logits_mask=lambda at: _chunk(at) & _document(at),
            sink=lambda at: float(SINKS[at.q_head]),
        ),
        {
            "temperature": TEMPERATURE,
            "relative_bias": RELATIVE,
            "sinks": SINKS,
            **variants.documents(DOCUMENTS),
        },
    ),
}
STREAMING = variants.StreamingLLM(5, 40) & variants.RoPE(DIM)


@cache
def engine_of(variant: Variant) -> Attention:
    made = [*(case.variant for case in CASES.values()), STREAMING, CAUSAL & variants.ALiBi()]
    build([attention_spec("cpu", torch.float32, DIM, DIM, each) for each in made])
    return Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=variant)


@cache
def shared_problem() -> Problem:
    return make_problem(QO_LENS, KV_LENS, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, seed=31)


def check(case: Case, problem: Problem, num_workers: int, *, split: bool = True) -> None:
    """The engine's answer is the oracle's; the plan is given the parameters too, as declared ranges need them."""
    engine, answer = engine_of(case.variant), problem.answer(case.band, case.hooks)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=num_workers, params=case.params)
    assert num_workers == 1 or not split or plan.num_splits > 1
    _, out = strided_out(problem, engine)
    softmax = engine.variant.use_softmax
    result = engine.run(
        plan, problem.q, problem.k_cache, problem.v_cache, params=case.params, out=out, return_lse=softmax
    )
    assert_out(out[: problem.total_q], answer, DIM, torch.float32)
    if softmax:
        assert_lse(result[1], answer, DIM)
