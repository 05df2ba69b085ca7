"""The custom operator: torch.compile without a graph break, a fake kernel, and torch's own checks of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom.core.plan import Plan
from tests.core import kernels
from tests.core.problem import Problem, make_problem
from tests.core.running import assert_untouched, strided_out
from tests.core.storage import poisoned
from tests.core.variant_cases import SOFT_CAP, STATEFUL, Case
from tests.tolerance import assert_out

F32 = kernels.Plain(torch.float32, 64)


def _problem() -> Problem:
    return make_problem([1, 5, 2], [130, 5, 40])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_equals_eager(backend: str, return_lse: bool) -> None:
    problem = _problem()
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    total_q = problem.total_q

    def layer(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
        result = engine.run(plan, q * 2.0, k_cache, v_cache, return_lse=return_lse)
        return (result[0] + 1.0, result[1]) if return_lse else result + 1.0

    args = (problem.q[:total_q], problem.k_cache, problem.v_cache)
    expected = layer(*args)
    got = torch.compile(layer, fullgraph=True, backend=backend)(*args)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_what_launches_on_a_gpu_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem()
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    args = (problem.q, problem.k_cache, problem.v_cache)
    expected = engine.run(plan, *args)

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return engine.run(plan, q, k_cache, v_cache)

    monkeypatch.setattr(engine, "direct", object())  # of which nothing may be asked
    assert torch.equal(torch.compile(Layer(), fullgraph=True, backend="eager")(*args), expected)
    for strict in (False, True):
        assert "attnloom.attention" in str(torch.export.export(Layer(), args, strict=strict).graph)


def test_compiled_with_out_writes_into_it() -> None:
    problem = _problem()
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    total_q = problem.total_q

    def layer(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        engine.run(plan, q, k_cache, v_cache, out=out)
        return out * 1.0

    q = problem.q[:total_q]
    out = poisoned(total_q, 4, 64, dtype=torch.float32)
    expected = engine.run(plan, q, problem.k_cache, problem.v_cache)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, problem.k_cache, problem.v_cache, out)
    assert torch.equal(got, expected) and torch.equal(out, expected)


@pytest.mark.parametrize("case", [STATEFUL, SOFT_CAP], ids=["tensor", "scalar"])
def test_compiled_with_hook_parameters(case: Case) -> None:
    problem = make_problem([1, 5, 2], [130, 5, 40], num_qo_heads=6)
    engine = kernels.engine_of(case.variant)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    total_q = problem.total_q

    def layer(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return engine.run(plan, q, k_cache, v_cache, params=case.params)

    args = (problem.q[:total_q], problem.k_cache, problem.v_cache)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*args)
    assert torch.equal(got, layer(*args))


def test_a_compiled_layer_follows_the_plan_it_is_given() -> None:
    """A new plan every step: nothing of the first one is baked in."""
    engine = kernels.plain_engine(F32, 4, 2, None, 0)

    def layer(plan: Plan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return engine.run(plan, q, k_cache, v_cache)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed, kv_lens in enumerate(([130, 5, 40], [20, 7, 300], [64, 5, 2], [0, 9, 77])):
        problem = make_problem([1, 5, 2], kv_lens, seed=seed)
        plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=2 + seed)
        args = (plan, problem.q, problem.k_cache, problem.v_cache)
        assert torch.equal(compiled(*args), layer(*args)), f"step {seed}"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_a_negated_hook_parameter(backend: str) -> None:
    """torch resolves the negative bit of the operator's tensors, but not in a list in which there may be None."""
    problem = make_problem([1, 5, 2], [130, 5, 40], num_qo_heads=6)
    engine = kernels.engine_of(STATEFUL.variant)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    params = {name: value for name, value in STATEFUL.params.items() if isinstance(value, torch.Tensor)}
    (name, tensor), *_ = [(name, value) for name, value in params.items() if value.is_floating_point()]
    rest = {other: value for other, value in STATEFUL.params.items() if other != name}

    def layer(given: torch.Tensor) -> torch.Tensor:
        return engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params={**rest, name: given})

    negated = torch._neg_view((-tensor).clone())
    assert negated.is_neg() and torch.equal(negated, tensor)
    expected = layer(tensor)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(negated), expected)


def test_opcheck() -> None:
    """torch's own checks: schema (what is written), fake kernel, tracing with static and dynamic shapes."""
    problem = _problem()
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    layout, total_q = problem.layout, problem.total_q
    arguments = {
        "q": problem.q[:total_q].clone(),
        "k_cache": torch.nan_to_num(problem.k_cache, 0.0, 0.0, 0.0),
        "v_cache": torch.nan_to_num(problem.v_cache, 0.0, 0.0, 0.0),
        "out": torch.zeros(total_q, 4, 64),
        "lse": torch.zeros(total_q, 4),
        "tensors": [plan.buffer, layout.starts, layout.lengths, layout.indices, None, None],
    }
    numbers = [engine.handle, plan.num_workers, plan.key.tile_q, plan.lockstep]
    numbers += [layout.block_size, layout.index_stride, 0, 0.125, 1.0, 1.0]
    operator = torch.ops.attnloom.attention.default
    torch.library.opcheck(operator, (), {**arguments, "numbers": numbers})


def test_the_operator_writes_only_rows_of_the_batch() -> None:
    problem = _problem()
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    buffer, out = strided_out(problem, engine)

    def layer(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return engine.run(plan, q, k_cache, v_cache, out=out)

    torch.compile(layer, fullgraph=True, backend="aot_eager")(problem.q, problem.k_cache, problem.v_cache, out)
    assert_untouched(buffer, out, problem.total_q)
    assert_out(out[: problem.total_q], problem.answer(), 64, torch.float32)


def test_bad_input_is_refused_while_compiling() -> None:
    problem = _problem()
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    off = torch.zeros(problem.k_cache.numel() + 1)[1:].reshape(problem.k_cache.shape)
    compiled = torch.compile(engine.run, backend="aot_eager")
    with pytest.raises(Exception, match="k_cache"):
        compiled(plan, problem.q, off, problem.v_cache)
