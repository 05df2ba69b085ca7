"""The catalogue against the oracle: each entry's definition again, in float64 numpy, under plans that split rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from attnloom import Attention, Variant, variants
from attnloom.core.kernels import attention_spec
from tests.core.catalogue_cases import (
    CAP,
    CASES,
    CAUSAL,
    DIM,
    GROK_LENGTH,
    HEADS,
    KV_HEADS,
    check,
    engine_of,
    shared_problem,
)
from tests.core.problem import make_problem
from tests.oracle import Array, At, Hooks

SKIPPING = ("chunked local", "prefix LM", "documents", "causal documents", "everything that composes")


@pytest.mark.parametrize("num_workers", [1, 7])
@pytest.mark.parametrize("name", CASES)
def test_catalogue(name: str, num_workers: int) -> None:
    case = CASES[name]
    plain = shared_problem().answer(case.band)
    assert np.abs(plain.out - shared_problem().answer(case.band, case.hooks).out).max() > 0.05, (
        "the test could not fail"
    )
    check(case, shared_problem(), num_workers)


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
    case, problem = CASES[name], shared_problem()
    engine, band = engine_of(case.variant), Variant("band", left=case.variant.left, right=case.variant.right)
    planned = engine.plan(problem.qo_indptr, problem.layout, num_workers=3, params=case.params)
    whole = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=band)
    everything = whole.plan(problem.qo_indptr, problem.layout, num_workers=3)
    assert sum(planned.worker_tiles()) < sum(everything.worker_tiles())


def test_values_given_to_an_entry_are_bound_and_may_be_overridden() -> None:
    case, problem = CASES["soft cap, temperature (Grok)"], shared_problem()
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
