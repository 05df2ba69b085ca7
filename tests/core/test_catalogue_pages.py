"""Entries that keep or select pages: StreamingLLM and page selection, at the positions that are left."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attnloom import variants
from tests.core.catalogue_cases import (
    CAUSAL,
    DIM,
    HEADS,
    KV_HEADS,
    SLOPES,
    STREAMING,
    check,
    engine_of,
    frequencies,
    rotation,
)
from tests.core.problem import Problem, make_problem
from tests.core.variant_cases import Case
from tests.oracle import Hooks, attention
from tests.tolerance import assert_lse, assert_out


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
    rotate = rotation(frequencies(DIM, 10000.0), interleaved=False)
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
