"""Tensors that plan() and run() refuse: the error names the argument and its value, and nothing has run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnloom.core.attention import Attention
from attnloom.core.launch import run_count
from tests.core import kernels
from tests.core.problem import Problem, make_problem
from tests.core.variant_cases import ALIBI, SOFT_CAP

F32 = kernels.Plain(torch.float32, 64)


def _engine() -> Attention:
    return kernels.plain_engine(F32, 4, 2, None, 0)


def _problem() -> Problem:
    return make_problem([1, 3], [40, 9], block_size=16)


def _odd(cache: torch.Tensor) -> torch.Tensor:
    """The same shape with a slot stride that is not a multiple of 16 bytes."""
    return torch.zeros(*cache.shape[:3], 65)[..., :64]


def _off_base(cache: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, four bytes off."""
    return torch.zeros(cache.numel() + 1)[1:].reshape(cache.shape)


RUN: list[tuple[str, Callable[[Problem], object], type[Exception], str]] = [
    ("q", lambda p: p.q[:3], ValueError, r"q\.shape=\(3, 4, 64\): .*4"),
    ("q", lambda p: p.q[:, :2], ValueError, r"q\.shape=\(\d+, 2, 64\)"),
    ("q", lambda p: p.q[..., :32], ValueError, r"q\.shape=\(\d+, 4, 32\)"),
    ("q", lambda p: p.q[0], ValueError, r"q\.shape=\(4, 64\): expected 3"),
    ("q", lambda p: p.q.bfloat16(), TypeError, r"q\.dtype=torch\.bfloat16: .*float32"),
    ("q", lambda p: torch.zeros(8, 4, 128)[..., ::2], ValueError, r"q\.stride\(\)=\(512, 128, 2\)"),
    ("q", lambda p: p.q.to("meta"), ValueError, r"q\.device=meta: .*cpu"),
    ("q", lambda p: None, TypeError, r"q: expected a tensor, got NoneType"),
    ("k_cache", lambda p: p.k_cache.half(), TypeError, r"k_cache\.dtype=torch\.float16"),
    ("k_cache", lambda p: p.k_cache[:, :8], ValueError, r"k_cache\.shape=\(\d+, 8, 2, 64\): .*16, 2, 64"),
    ("k_cache", lambda p: p.k_cache[:, :, :1], ValueError, r"k_cache\.shape=\(\d+, 16, 1, 64\)"),
    ("k_cache", lambda p: p.k_cache[0], ValueError, r"k_cache\.shape=\(16, 2, 64\): expected 4"),
    ("k_cache", lambda p: _odd(p.k_cache), ValueError, r"k_cache\.stride\(\)=.*16 bytes"),
    ("k_cache", lambda p: _off_base(p.k_cache), ValueError, r"k_cache\.data_ptr\(\)=.*16 bytes"),
    ("v_cache", lambda p: _odd(p.v_cache), ValueError, r"v_cache\.stride\(\)=.*16 bytes"),
    ("v_cache", lambda p: p.v_cache[..., :32], ValueError, r"v_cache\.shape=\(\d+, 16, 2, 32\)"),
    ("v_cache", lambda p: torch.zeros(*p.v_cache.shape[:3], 128)[..., ::2], ValueError, r"v_cache\.stride\(\)"),
    ("v_cache", lambda p: p.v_cache.to("meta"), ValueError, r"v_cache\.device=meta"),
    ("plan", lambda p: None, TypeError, r"plan: expected a Plan, got NoneType"),
    ("params", lambda p: {"logit_cap": 3.0}, ValueError, r"params=.*logit_cap"),
    ("out", lambda p: torch.zeros(3, 4, 64), ValueError, r"out\.shape=\(3, 4, 64\)"),
    ("out", lambda p: torch.zeros(4, 4, 64, dtype=torch.float16), TypeError, r"out\.dtype=torch\.float16"),
    ("out", lambda p: torch.zeros(4, 4, 128)[..., ::2], ValueError, r"out\.stride\(\)"),
]


@pytest.mark.parametrize(("argument", "make", "error", "message"), RUN, ids=[f"{i}-{r[0]}" for i, r in enumerate(RUN)])
def test_run(argument: str, make: Callable[[Problem], object], error: type[Exception], message: str) -> None:
    problem, engine = _problem(), _engine()
    arguments: dict[str, Any] = {
        "plan": engine.plan(problem.qo_indptr, problem.layout),
        "q": problem.q,
        "k_cache": problem.k_cache,
        "v_cache": problem.v_cache,
    }
    before = run_count()
    with pytest.raises(error, match=message):
        engine.run(**{**arguments, argument: make(problem)})
    assert run_count() == before
    engine.run(**arguments)
    assert run_count() == before + 1


INT32 = torch.int32
PLAN: list[tuple[str, Callable[[Problem], object], type[Exception], str]] = [
    ("qo_indptr", lambda p: torch.tensor([0, 3, 1], dtype=INT32), ValueError, r"qo_indptr\[2\]=1: .*qo_indptr\[1\]=3"),
    ("qo_indptr", lambda p: torch.tensor([0, 3], dtype=INT32), ValueError, r"qo_indptr\.shape=\(2,\): expected 3"),
    ("qo_indptr", lambda p: torch.tensor([2, 3, 4], dtype=INT32), ValueError, r"qo_indptr\[0\]=2: expected 0"),
    ("qo_indptr", lambda p: torch.tensor([0, 1, 4]), TypeError, r"qo_indptr\.dtype=torch\.int64: .*int32"),
    ("qo_indptr", lambda p: [0, 1, 4], TypeError, r"qo_indptr: expected a tensor, got list"),
    ("qo_indptr", lambda p: torch.zeros(1, 3, dtype=INT32), ValueError, r"qo_indptr\.shape=\(1, 3\)"),
    ("kv_lens", lambda p: torch.tensor([40, -1], dtype=INT32), ValueError, r"kv_lens\[1\]=-1: expected at least 0"),
    ("kv_lens", lambda p: torch.tensor([40], dtype=INT32), ValueError, r"kv_lens\.shape=\(1,\): .*2"),
    ("kv_lens", lambda p: torch.tensor([40.0, 9.0]), TypeError, r"kv_lens\.dtype=torch\.float32"),
    ("kv_lens", lambda p: [40, 9], TypeError, r"kv_lens: expected a tensor, got list"),
    ("layout", lambda p: None, TypeError, r"layout: expected a BlockSparseLayout, got NoneType"),
    ("num_workers", lambda p: 0, ValueError, r"num_workers=0: expected at least 1"),
    ("num_workers", lambda p: 2.5, TypeError, r"num_workers=2\.5"),
]


@pytest.mark.parametrize(
    ("argument", "make", "error", "message"), PLAN, ids=[f"{i}-{r[0]}" for i, r in enumerate(PLAN)]
)
def test_plan(argument: str, make: Callable[[Problem], object], error: type[Exception], message: str) -> None:
    problem, engine = _problem(), _engine()
    arguments: dict[str, Any] = {"qo_indptr": problem.qo_indptr, "layout": problem.layout, argument: make(problem)}
    with pytest.raises(error, match=message):
        engine.plan(**arguments)


def _run_with(problem: Problem, **layout: torch.Tensor) -> None:
    engine = _engine()
    changed = dataclasses.replace(problem.layout, **layout)
    kv_lens = torch.tensor(problem.kv_lens, dtype=INT32)
    plan = engine.plan(problem.qo_indptr, changed, kv_lens=kv_lens)
    engine.run(plan, problem.q, problem.k_cache, problem.v_cache)


@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1])
def test_a_block_that_the_cache_does_not_hold(bad: int) -> None:
    problem = make_problem([1, 3], [20, 9], block_size=16, table="csr")
    assert problem.k_cache.shape[0] == 7
    indices = problem.layout.indices.clone()
    indices[1] = bad
    with pytest.raises(ValueError, match=rf"indices.*{bad}|{bad}.*indices"):
        _run_with(problem, indices=indices)


def test_a_smaller_cache_under_the_same_plan_is_checked_too() -> None:
    """The check runs once per (plan, cache): another cache is another check."""
    problem, engine = _problem(), _engine()
    plan = engine.plan(problem.qo_indptr, problem.layout)
    engine.run(plan, problem.q, problem.k_cache, problem.v_cache)
    highest = max(max(ids) for ids in problem.block_ids)
    with pytest.raises(ValueError, match=rf"{highest}"):
        engine.run(plan, problem.q, problem.k_cache[:highest], problem.v_cache)


@pytest.mark.parametrize("length", [-5, 10_000])
def test_a_true_length_that_the_table_cannot_hold(length: int) -> None:
    problem = make_problem([1, 3], [40, 9], block_size=16, table="csr")
    with pytest.raises(ValueError, match=rf"lengths\[1\]={length}"):
        _run_with(problem, lengths=torch.tensor([40, length], dtype=INT32))


def test_a_row_that_starts_outside_the_table() -> None:
    problem = make_problem([1, 3], [40, 9], block_size=16, table="csr")
    with pytest.raises(ValueError, match=r"starts|lengths|indices"):
        _run_with(problem, starts=torch.tensor([0, 10_000], dtype=torch.int64))
    with pytest.raises(ValueError, match=r"starts|lengths|indices"):
        _run_with(problem, starts=torch.tensor([-1, 3], dtype=torch.int64))


def test_a_plan_of_another_engine() -> None:
    problem = _problem()
    plan = kernels.plain_engine(F32, 8, 2, None, 0).plan(problem.qo_indptr, problem.layout)
    with pytest.raises(ValueError, match=r"plan\.key=.*num_qo_heads=8.*num_qo_heads=4"):
        _engine().run(plan, problem.q, problem.k_cache, problem.v_cache)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (None, ValueError, r"missing \['alibi_slopes'\]"),
        ({"alibi_slopes": torch.zeros(5)}, ValueError, r"params\['alibi_slopes'\]\.shape=\(5,\): expected 6"),
        ({"alibi_slopes": torch.zeros(6, 1)}, ValueError, r"params\['alibi_slopes'\]\.shape=\(6, 1\)"),
        ({"alibi_slopes": torch.zeros(6).double()}, TypeError, r"params\['alibi_slopes'\]\.dtype=torch\.float64"),
        ({"alibi_slopes": 1.0}, TypeError, r"params\['alibi_slopes'\]: expected a tensor, got float"),
        ({"alibi_slopes": torch.zeros(6), "other": 1.0}, ValueError, r"unknown \['other'\]"),
    ],
)
def test_hook_tensor(params: dict[str, Any] | None, error: type[Exception], message: str) -> None:
    problem = make_problem([1, 3], [40, 9], num_qo_heads=6)
    engine = kernels.engine_of(ALIBI.variant)
    plan = engine.plan(problem.qo_indptr, problem.layout)
    with pytest.raises(error, match=message):
        engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params=params)


@pytest.mark.parametrize("value", [torch.tensor(1.0), "1.0", None, True])
def test_hook_scalar(value: Any) -> None:
    problem = make_problem([1, 3], [40, 9], num_qo_heads=6)
    engine = kernels.engine_of(SOFT_CAP.variant)
    plan = engine.plan(problem.qo_indptr, problem.layout)
    with pytest.raises(TypeError, match=r"params\['logit_cap'\]=.*: expected a number"):
        engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params={"logit_cap": value})


@pytest.mark.parametrize("scale", ["sm_scale", "k_scale", "v_scale"])
def test_scales_are_numbers(scale: str) -> None:
    problem, engine = _problem(), _engine()
    plan = engine.plan(problem.qo_indptr, problem.layout)
    with pytest.raises((TypeError, ValueError), match=scale):
        engine.run(plan, problem.q, problem.k_cache, problem.v_cache, **{scale: "a lot"})
