"""The catalogue against the oracle: each entry's definition again, in float64 numpy, under plans that split rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from attnloom import Attention, CompositionError, Param, Variant, variants
from attnloom.core.jit import build
from attnloom.core.kernels import attention_spec
from attnloom.core.params import check_captures, ordered
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


def _rotation(frequencies: list[float], *, interleaved: bool) -> Transform:
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


def _frequencies(rotary_dim: int, base: float) -> list[float]:
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


HALVES = _rotation([_llama3(f) for f in _frequencies(DIM, 500.0)], interleaved=False)
NEIGHBOURS = _rotation([f / 2.5 for f in _frequencies(48, 10000.0)], interleaved=True)

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
SKIPPING = ("chunked local", "prefix LM", "documents", "causal documents", "everything that composes")
STREAMING = variants.StreamingLLM(5, 40) & variants.RoPE(DIM)


@cache
def engine_of(variant: Variant) -> Attention:
    made = [*(case.variant for case in CASES.values()), STREAMING, CAUSAL & variants.ALiBi()]
    build([attention_spec("cpu", torch.float32, DIM, DIM, each) for each in made])
    return Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=variant)


@cache
def _problem() -> Problem:
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


@pytest.mark.parametrize("num_workers", [1, 7])
@pytest.mark.parametrize("name", CASES)
def test_catalogue(name: str, num_workers: int) -> None:
    case = CASES[name]
    plain = _problem().answer(case.band)
    assert np.abs(plain.out - _problem().answer(case.band, case.hooks).out).max() > 0.05, "the test could not fail"
    check(case, _problem(), num_workers)


@pytest.mark.parametrize("num_workers", [1, 7])
def test_queries_after_the_last_document_see_nothing(num_workers: int) -> None:
    """And those before them in their tile see their own."""
    case, problem = CASES["documents"], make_problem([160, 3], [165, 14], num_qo_heads=HEADS, num_kv_heads=KV_HEADS)
    lengths = [[90, 70], [5, 7]]

    def seen(at: At) -> Array:
        bounds = np.cumsum([0, *lengths[at.request]])
        document = [np.searchsorted(bounds, positions, side="right") for positions in (at.q_pos, at.kv_pos)]
        return (document[0] == document[1]) & (at.q_pos < bounds[-1])

    params = variants.documents(lengths)
    check(dataclasses.replace(case, hooks=Hooks(logits_mask=seen), params=params), problem, num_workers, split=False)


@pytest.mark.parametrize("name", SKIPPING)
def test_hidden_tiles_are_not_planned(name: str) -> None:
    case, problem = CASES[name], _problem()
    engine, band = engine_of(case.variant), Variant("band", left=case.variant.left, right=case.variant.right)
    planned = engine.plan(problem.qo_indptr, problem.layout, num_workers=3, params=case.params)
    whole = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=band)
    everything = whole.plan(problem.qo_indptr, problem.layout, num_workers=3)
    assert sum(planned.worker_tiles()) < sum(everything.worker_tiles())


def test_values_given_to_an_entry_are_bound_and_may_be_overridden() -> None:
    case, problem = CASES["soft cap, temperature (Grok)"], _problem()
    bound = dataclasses.replace(case, variant=CAUSAL & variants.SoftCap(CAP) & variants.GrokTemperature(), params={})
    check(dataclasses.replace(bound, params={"temperature_len": GROK_LENGTH}), problem, 7)
    other = {"logit_cap": CAP, "temperature_len": GROK_LENGTH}
    check(
        dataclasses.replace(bound, variant=CAUSAL & variants.SoftCap(1.0) & variants.GrokTemperature(9), params=other),
        problem,
        7,
    )
    specs = {attention_spec("cpu", torch.float32, DIM, DIM, variants.ChunkedLocal(chunk)) for chunk in (16, 4096)}
    assert len(specs) == 1, "what an entry is made with is not compiled in"


def test_streaming_llm_counts_positions_in_the_cache() -> None:
    """Decode: what is left of a row is computed as a text of its own, without what fell out."""
    sinks, window, lens = 5, 40, [300, 45, 46, 12, 170]
    problem = make_problem([1] * 5, lens, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, seed=8)
    layout, params = variants.streaming(problem.layout, problem.qo_lens, sinks, window)
    dense = problem.dense()
    for row, request in enumerate(dense):
        length = lens[row]
        kept = [*range(min(sinks, length)), *range(max(sinks, length - window), length)]
        dense[row] = dataclasses.replace(request, k=request.k[kept], v=request.v[kept], kv_pos=list(range(len(kept))))
    _check_streaming(problem, layout, params, dense, Hooks())
    assert int(layout.lengths[0]) == 16 + 48 - 4 and int(layout.lengths[1]) == 45, "what fell out is not read"


@pytest.mark.parametrize("whole", [False, True])
def test_streaming_llm_with_several_queries(whole: bool) -> None:
    """A chunk of queries; with a whole layout the same mask stands at the positions of the text."""
    sinks, window, n = 5, 40, [30, 7, 1]
    problem = make_problem(n, [200, 90, 64], num_qo_heads=HEADS, num_kv_heads=KV_HEADS, seed=9)
    dense = problem.dense()
    if whole:
        layout, params = problem.layout, {"window_begin": torch.zeros(3, dtype=torch.int32)}
    else:
        layout, params = variants.streaming(problem.layout, n, sinks, window)
        for row, request in enumerate(dense):
            length = len(request.kv_pos)
            first = length - n[row] - window + 1
            kept = [*range(sinks), *range(first, length)]
            dense[row] = dataclasses.replace(
                request, k=request.k[kept], v=request.v[kept], kv_pos=list(range(len(kept)))
            )
    mask = Hooks(logits_mask=lambda at: (at.kv_index < sinks) | (at.q_pos - at.kv_pos < window))
    _check_streaming(problem, layout, params, dense, mask)


def _check_streaming(problem: Problem, layout: Any, params: Any, dense: Any, hooks: Hooks) -> None:
    from tests.oracle import attention

    rotate = _rotation(_frequencies(DIM, 10000.0), interleaved=False)
    answer = attention(dense, hooks=dataclasses.replace(hooks, query_transform=rotate, key_transform=rotate))
    engine = engine_of(STREAMING)
    for num_workers in (1, 7):
        plan = engine.plan(problem.qo_indptr, layout, num_workers=num_workers, params=params)
        out, lse = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params=params, return_lse=True)
        assert_out(out, answer, DIM, torch.float32)
        assert_lse(lse, answer, DIM)


def test_selected_pages_keep_their_positions() -> None:
    """Quest and NSA: chosen pages, ALiBi and causality by the positions they have in the text."""
    problem = make_problem([1, 20, 3, 1], [200, 130, 40, 0], num_qo_heads=HEADS, num_kv_heads=KV_HEADS, seed=10)
    chosen = [[0, 3, 7, 12], [2, 7, 8], [2], []]
    table = torch.full((4, 4), -9, dtype=torch.int32)
    for row, pages in enumerate(chosen):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    layout = variants.select_pages(problem.layout, table, torch.tensor([len(pages) for pages in chosen]))
    assert layout.lengths.tolist() == [3 * 16 + 8, 2 * 16 + 2, 8, 0]
    ids = [[problem.block_ids[row][page] for page in pages] for row, pages in enumerate(chosen)]
    selected = dataclasses.replace(problem, layout=layout, block_ids=ids, kv_lens=layout.lengths.tolist())
    assert selected.positions(0, 56)[15:18] == [15, 48, 49]
    alibi = Case(
        CAUSAL & variants.ALiBi(),
        Hooks(logits_transform=lambda x, at: x + float(SLOPES[at.q_head]) * (at.kv_pos - at.q_pos)),
        {"alibi_slopes": SLOPES},
    )
    for num_workers in (1, 7):
        check(alibi, selected, num_workers, split=False)
    again = variants.select_pages(layout, torch.tensor([[1, 3], [0, 2], [0, 0], [0, 0]]), torch.tensor([2, 2, 1, 0]))
    assert again.positions is not None and again.positions[:2].tolist() == [48, 192]


def test_t5_buckets_become_a_table() -> None:
    """Each column holds the bucket that T5 gives its distance, one distance at a time as its paper's code has it."""
    weight = torch.arange(32.0)[:, None] + torch.tensor([0.0, 100.0])

    def bucket(memory_minus_query: int, bidirectional: bool, buckets: int, largest: int) -> int:
        n, ret = -memory_minus_query, 0
        if bidirectional:
            buckets //= 2
            ret += buckets if n < 0 else 0
            n = abs(n)
        else:
            n = max(n, 0)
        exact = buckets // 2
        if n < exact:
            return ret + n
        return ret + min(exact + int(math.log(n / exact) / math.log(largest / exact) * (buckets - exact)), buckets - 1)

    for bidirectional in (False, True):
        table = variants.t5_relative_bias(weight, 100, bidirectional=bidirectional)
        wanted = [bucket(distance, bidirectional, 32, 100) for distance in range(-100, 101)]
        assert table[0].tolist() == wanted and table[1].tolist() == [100.0 + b for b in wanted]
        assert bucket(-5000, bidirectional, 32, 100) == wanted[0], "farther ones share the last bucket"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: variants.Sigmoid() & variants.Sinks(), "joins the softmax's sum, and sigmoid uses none"),
        (lambda: variants.Sinks() & variants.Sigmoid(), "joins the softmax's sum"),
        (lambda: variants.Sigmoid() & variants.ALiBi(), "write alibi & sigmoid"),
        (lambda: CAUSAL & variants.Sigmoid() & variants.SoftCap(), "write soft_cap & causal_sigmoid"),
        (lambda: variants.Sigmoid() & variants.Sigmoid(), "sigmoid"),
        (lambda: variants.Sinks() & variants.Sinks(), "both have a sink"),
        (
            lambda: (
                variants.ALiBi()
                & Variant("other", (Param("alibi_slopes", shape=(None,)),), logits_mask="return false;")
            ),
            "declared as",
        ),
    ],
)
def test_compositions_without_meaning_say_why(make: Callable[[], Variant], says: str) -> None:
    with pytest.raises(CompositionError, match=says) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def _select(pages: list[list[int]]) -> object:
    return variants.select_pages(_problem().layout, torch.tensor(pages), torch.tensor([1, 1, 1, 1, 0]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: variants.ChunkedLocal(0), "chunk=0"),
        (lambda: variants.ChunkedLocal(2**30 + 1), "chunk=1073741825: expected at most"),
        (lambda: variants.StreamingLLM(4, 0), "window=0"),
        (lambda: variants.SoftCap(0), "cap=0: expected a finite float32 above 0"),
        (lambda: variants.SoftCap(-5.0), "cap=-5.0: expected a finite float32 above 0"),
        (lambda: variants.SoftCap(float("inf")), "cap=inf: "),
        (lambda: variants.SoftCap(float("nan")), "cap=nan: "),
        (lambda: variants.SoftCap(1e39), "cap=1e"),
        (lambda: variants.GrokTemperature(1), "length=1: expected at least 2"),
        (lambda: variants.Sigmoid(float("nan")), "bias=nan: expected a finite number"),
        (lambda: variants.RoPE(64, 0.0), "base=0.0: expected a finite float32 above 0"),
        (lambda: variants.RoPE(64, -1), "base=-1: "),
        (
            lambda: variants.RoPE(64, scaling={"rope_type": "linear", "factor": float("inf")}),
            r"scaling\['factor'\]=inf",
        ),
        (lambda: variants.RoPE(63), "rotary_dim=63"),
        (lambda: variants.RoPE(64, scaling={"rope_type": "yarn", "factor": 2.0}), "linear or llama3"),
        (lambda: variants.RoPE(64, scaling={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor"),
        (lambda: variants.documents([[3, 0]]), "lengths"),
        (lambda: variants.streaming(_problem().layout, [1], 4, 8), "qo_lens"),
        (lambda: _select([[0], [0], [10], [0], [0]]), r"pages\[0\]: expected the row's last page, 18"),
        (lambda: _select([[99], [0], [10], [0], [0]]), "expected 0 to 18"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: variants.SoftCap([1]), r"cap=\[1\]: expected a number"),  # type: ignore[arg-type]
        (lambda: variants.RoPE("x"), "rotary_dim='x': expected an int"),  # type: ignore[arg-type]
        (lambda: variants.RoPE(64, "x"), "base='x': expected a number"),  # type: ignore[arg-type]
        (lambda: variants.RoPE(64, scaling=3), "scaling=3: expected a mapping"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make()


@pytest.mark.parametrize(
    ("variant", "params", "says"),
    [
        (variants.SoftCap(), {"logit_cap": 0.0}, r"params\['logit_cap'\]=0.0: expected a finite number above 0"),
        (
            variants.SoftCap(),
            {"logit_cap": float("inf")},
            r"params\['logit_cap'\]=inf: expected a finite number above 0",
        ),
        (variants.GrokTemperature(), {"temperature_len": 1}, r"params\['temperature_len'\]=1: expected .* above 1"),
        (variants.ChunkedLocal(64), {"chunk_size": 0}, r"params\['chunk_size'\]=0: expected 64, which the variant"),
        (variants.ChunkedLocal(64), {"chunk_size": 128}, r"params\['chunk_size'\]=128: expected 64, which the variant"),
    ],
)
def test_values_that_an_entry_cannot_take_are_refused(variant: Variant, params: dict[str, float], says: str) -> None:
    declared = variant.params
    with pytest.raises(ValueError, match=says):
        ordered(declared, variant.captures, params, {})
    good = {"logit_cap": 5.0, "temperature_len": 9, "chunk_size": 64}
    names = [param.name for param in declared]
    assert ordered(declared, variant.captures, {name: good[name] for name in names}, {}) == [good[n] for n in names]


def test_more_rotated_dimensions_than_a_head_has() -> None:
    variant = CAUSAL & variants.RoPE(2 * DIM)
    with pytest.raises(
        ValueError, match=rf"rope_frequencies.*shape=\({DIM},\): expected at most {DIM // 2} .*head_dim/2"
    ):
        Attention(4, 2, DIM, dtype=torch.float32, variant=variant)
    check_captures(variants.RoPE(DIM).params, variants.RoPE(DIM).captures, {"head_dim": DIM})
