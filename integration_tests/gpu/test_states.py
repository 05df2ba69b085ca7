"""Merging and finishing states on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from attnloom import BlockSparseLayout, finish_state, merge_states, variants
from integration_tests.gpu.problem import PAGE, Problem, engine_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def states(num_states: int, rows: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    outs = torch.randn(num_states, rows, heads, dim, device="cuda")
    lses = torch.randn(num_states, rows, heads, device="cuda") * 4
    return outs, lses


@pytest.mark.parametrize("shape", [(1, 3, 2, 64), (2, 17, 5, 128), (7, 100, 8, 80), (40, 1, 1, 256), (3, 0, 4, 64)])
def test_merge_equals_the_formula(shape: tuple[int, int, int, int]) -> None:
    outs, lses = states(*shape)
    lses[0, ::2] = -math.inf
    outs[0, ::2] = math.nan  # a part that saw no key has left nothing
    out, lse = merge_states(outs, lses)
    assert lse is not None
    weights = torch.softmax(lses.double(), 0).nan_to_num()
    expected = (outs.double().nan_to_num() * weights[..., None]).sum(0)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), torch.logsumexp(lses.double(), 0), atol=1e-5, rtol=1e-5)
    again, _ = merge_states(outs, lses)
    assert torch.equal(out, again)


def test_merge_equals_the_cpu() -> None:
    outs, lses = states(5, 33, 4, 96)
    out, lse = merge_states(outs, lses)
    cpu_out, cpu_lse = merge_states(outs.cpu(), lses.cpu())
    assert lse is not None and cpu_lse is not None
    torch.testing.assert_close(out.cpu(), cpu_out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.cpu(), cpu_lse, atol=1e-6, rtol=1e-6)


def test_parts_that_are_all_empty() -> None:
    outs, lses = states(3, 4, 2, 64)
    out, lse = merge_states(outs.fill_(math.nan), lses.fill_(-math.inf))
    assert lse is not None and not out.any() and bool((lse == -math.inf).all())


def test_states_without_softmax_add() -> None:
    outs, _ = states(3, 4, 2, 64)
    out, lse = merge_states(outs, None)
    assert lse is None
    torch.testing.assert_close(out, outs.sum(0))


@pytest.mark.parametrize("sinks", [False, True])
def test_halves_of_the_keys_merge_to_the_whole(sinks: bool) -> None:
    """Attention over the first half of the keys, then over the rest, is attention over all of them; the sink once."""
    engine = engine_of(variants.Full() & variants.Sinks() if sinks else variants.Full())
    params = {"sinks": torch.randn(engine.num_qo_heads, device="cuda")} if sinks else None
    problem = Problem([1, 1, 3, 1], [700, 64, 129, 1])
    whole = problem.device_plan(engine)
    middle = torch.tensor([352, 64, 16, 0], dtype=torch.int32, device="cuda")  # whole pages
    layout = problem.layout
    halves = [
        BlockSparseLayout(PAGE, layout.starts, middle, layout.indices),
        BlockSparseLayout(PAGE, layout.starts + middle // PAGE, layout.lengths - middle, layout.indices),
    ]
    pieces = []
    for half in halves:
        plan = engine.plan(problem.indptr, half, total_q=problem.total_q)
        pieces.append(engine.run(plan, problem.q, problem.k, problem.v, params=params, return_state=True))
    outs = torch.stack([out for out, _ in pieces])
    lses = torch.stack([lse for _, lse in pieces if lse is not None])
    merged, merged_lse = merge_states(outs, lses)
    out, lse = finish_state(engine, whole, merged, merged_lse, params=params, return_lse=True)
    expected, expected_lse = engine.run(whole, problem.q, problem.k, problem.v, params=params, return_lse=True)
    torch.testing.assert_close(out.float(), expected.float(), atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)
    if not sinks:
        torch.testing.assert_close(out.double(), problem.expected(causal=False), atol=2e-2, rtol=2e-2)
