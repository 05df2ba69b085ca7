"""States: merging them is associative and equals attention over the union; finishing them equals run()."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attnloom.core.layout import BlockSparseLayout
from attnloom.core.state import finish_state, merge_states
from tests import oracle
from tests.core import kernels
from tests.core.planning import indptr
from tests.core.problem import make_problem
from tests.core.running import assert_untouched, strided_out
from tests.core.variant_cases import LINEAR, STATEFUL
from tests.oracle import Band, DenseRequest
from tests.tolerance import assert_lse, assert_out, assert_state

F32 = kernels.Plain(torch.float32, 64)


def _states(
    count: int, rows: int = 5, heads: int = 3, dim: int = 8, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, rows, heads, dim, generator=g)
    lses = torch.randn(count, rows, heads, generator=g) * 5
    return outs, lses


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [3, 8, 64])
def test_merge_equals_oracle(count: int, dim: int) -> None:
    outs, lses = _states(count, dim=dim)
    out, lse = merge_states(outs, lses)
    expected_out, expected_lse = oracle.merge(list(outs.double().numpy()), list(lses.double().numpy()))
    assert out.dtype == torch.float32 and lse.dtype == torch.float32
    np.testing.assert_allclose(out.double().numpy(), expected_out, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(lse.double().numpy(), expected_lse, rtol=1e-6, atol=1e-6)


def test_merge_is_associative() -> None:
    outs, lses = _states(4, seed=3)
    whole_out, whole_lse = merge_states(outs, lses)
    left = merge_states(outs[:2], lses[:2])
    right = merge_states(outs[2:], lses[2:])
    out, lse = merge_states(torch.stack([left[0], right[0]]), torch.stack([left[1], right[1]]))
    torch.testing.assert_close(out, whole_out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=2e-6)


def test_an_empty_state_is_the_identity_whatever_its_values() -> None:
    outs, lses = _states(3)
    lses[1] = -math.inf
    outs[1] = math.nan
    out, lse = merge_states(outs, lses)
    expected = merge_states(outs[[0, 2]], lses[[0, 2]])
    torch.testing.assert_close(out, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6)


def test_rows_that_nobody_saw_stay_empty() -> None:
    outs, lses = _states(3)
    lses[:, 2] = -math.inf
    outs[:, 2] = math.nan
    out, lse = merge_states(outs, lses)
    assert (out[2] == 0).all() and (lse[2] == -math.inf).all()
    assert torch.isfinite(out[[0, 1, 3, 4]]).all()


def test_far_apart_states_do_not_overflow() -> None:
    outs, lses = _states(2)
    lses[0], lses[1] = -300.0, 600.0
    out, lse = merge_states(outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])


def test_the_merge_does_not_write_into_its_arguments() -> None:
    outs, lses = _states(3)
    kept = outs.clone(), lses.clone()
    merge_states(outs, lses)
    assert torch.equal(outs, kept[0]) and torch.equal(lses, kept[1])


@pytest.mark.parametrize("num_workers", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_run_returns_the_state_in_float32(num_workers: int, dtype: torch.dtype) -> None:
    problem = make_problem([1, 9, 3], [300, 9, 0], dtype=dtype)
    engine = kernels.plain_engine(kernels.Plain(dtype, 64), 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=num_workers)
    out, lse = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, return_state=True)
    assert_state(out[: problem.total_q], lse[: problem.total_q], problem.answer(), 64, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finishing_a_state_equals_run(dtype: torch.dtype) -> None:
    """With a sink and an output hook: both act once, in finish_state."""
    case = STATEFUL
    problem = make_problem([1, 9, 3], [300, 9, 0], num_qo_heads=6, num_kv_heads=2, dtype=dtype)
    total_q = problem.total_q
    engine = kernels.engine_of(case.variant, dtype)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=7)
    args = (plan, problem.q, problem.k_cache, problem.v_cache)
    state, state_lse = engine.run(*args, params=case.params, return_state=True)
    buffer, view = strided_out(problem, engine)
    out, lse = finish_state(engine, plan, state, state_lse, params=case.params, out=view, return_lse=True)
    assert_untouched(buffer, view, total_q)
    answer = problem.answer(case.band, case.hooks)
    assert_state(state, state_lse, answer, 64, dtype)
    assert_out(out[:total_q], answer, 64, dtype, slope=case.slope)
    assert_lse(lse, answer, 64)
    direct, direct_lse = engine.run(*args, params=case.params, return_lse=True)
    assert torch.equal(direct, out[:total_q]) and torch.equal(direct_lse, lse)


def test_states_without_softmax_add() -> None:
    outs, _ = _states(3)
    out, lse = merge_states(outs, None)
    assert lse is None
    torch.testing.assert_close(out, outs.sum(0), rtol=1e-6, atol=1e-6)


def test_no_lse_without_softmax() -> None:
    problem = make_problem([1, 9], [300, 9], num_qo_heads=6, num_kv_heads=2)
    engine = kernels.engine_of(LINEAR.variant)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=7)
    args = (plan, problem.q, problem.k_cache, problem.v_cache)
    with pytest.raises(ValueError, match="return_lse=True"):
        engine.run(*args, return_lse=True)
    state, lse = engine.run(*args, return_state=True)
    assert lse is None
    assert torch.equal(finish_state(engine, plan, state, None), engine.run(*args))
    with pytest.raises(ValueError, match="return_lse"):
        finish_state(engine, plan, state, None, return_lse=True)


def test_states_of_two_halves_of_the_kv_merge_to_the_whole() -> None:
    """A context-parallel pair: each rank holds some of the blocks and sees all of its keys."""
    problem = make_problem([4, 1], [320, 96], block_size=32, seed=5)
    engine = kernels.plain_engine(F32, 4, 2, None, None)
    outs, lses = [], []
    for ids in ([b[:5] for b in problem.block_ids], [b[5:] for b in problem.block_ids]):
        layout = BlockSparseLayout.from_csr(
            indptr([len(row) for row in ids]),
            torch.tensor([block for row in ids for block in row], dtype=torch.int32),
            torch.tensor([32 * len(row) for row in ids], dtype=torch.int32),
            32,
        )
        plan = engine.plan(problem.qo_indptr, layout, num_workers=3)
        out, lse = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, return_state=True)
        outs.append(out)
        lses.append(lse)
    assert (lses[1][4] == -math.inf).all(), "the second rank holds no key of the second request"
    out, lse = merge_states(torch.stack(outs), torch.stack(lses))
    assert_state(out, lse, problem.answer(Band(None, None)), 64, torch.float32)


def test_the_oracle_agrees_that_halves_merge() -> None:
    """The same split in the oracle, so that the test above compares two independent routes."""
    whole = make_problem([2], [64], seed=6)
    (r,) = whole.dense()
    parts = [
        oracle.attention([DenseRequest(r.q, r.k[a:b], r.v[a:b], r.kv_pos[a:b])], band=Band(None, None))
        for a, b in ((0, 17), (17, 64))
    ]
    out, lse = oracle.merge([p.state_out for p in parts], [p.state_lse for p in parts])
    answer = whole.answer(Band(None, None))
    np.testing.assert_allclose(out, answer.out, atol=1e-13)
    np.testing.assert_allclose(lse, answer.lse, atol=1e-13)
