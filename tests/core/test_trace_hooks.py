"""Each hook as a Python function, alone, combined, and combined with hooks in C++, under plans that split rows.

The definitions are those of variant_cases, where the same hooks are C++ text; the oracle computes them in float64.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from attnloom import Variant
from attnloom.core.attention import Attention
from attnloom.core.jit import build
from attnloom.core.kernels import attention_spec
from tests.core import variant_cases as cases
from tests.core.problem import Problem, make_problem
from tests.core.running import check
from tests.core.variant_cases import HOOKS, NUM_KV_HEADS, NUM_QO_HEADS, Case
from tests.oracle import Hooks
from tests.tolerance import assert_out

RATE = torch.tensor(cases.QUERY.params["rate"])
GAIN, TILT, SINKS, BIAS = (
    HOOKS[hook].params[name]
    for hook, name in (
        ("value_transform", "gain"),
        ("logits_transform", "tilt"),
        ("sink", "sinks"),
        ("sigmoid", "bias"),
    )
)


def query_transform(query: Any, dim: Any, q_pos: Any, q_head: Any, request: Any) -> Any:
    angle = RATE * q_pos + 0.25 * q_head + 0.125 * request
    return query[dim] * torch.cos(angle) + torch.where(dim % 2 == 1, 1.0, -1.0) * query[dim ^ 1] * angle.sin()


def key_transform(dim: Any, key: Any, kv_pos: Any, kv_head: Any, request: Any) -> Any:
    return key[dim] * (1 + kv_pos / 512) - 0.5 * kv_head * key[dim ^ 1] + 0.25 * request


def value_transform(value: Any, dim: Any, kv_pos: Any, kv_head: Any, request: Any) -> Any:
    return value[dim] * GAIN[kv_head, dim] + torch.where(kv_pos % 2 == 0, 0.5, -0.5) * value[dim ^ 1] + request


def logits_transform(logits: Any, request: Any, q_pos: Any, kv_pos: Any, q_head: Any, kv_head: Any) -> Any:
    tilted = logits * TILT[q_head]
    return tilted + 0.0625 * (kv_head * (kv_pos % 7)) - 0.03125 * (q_pos - kv_pos) + request


def logits_mask(request: Any, q_pos: Any, kv_pos: Any, q_head: Any, kv_head: Any) -> Any:
    return torch.logical_and(q_pos % 5 != 0, (kv_pos + q_head + kv_head) % 3 != request % 3)


def output_transform(output: Any, dim: Any, q_head: Any, kv_head: Any, q_pos: Any, request: Any) -> Any:
    mixed = torch.tanh(output[dim]) + 0.125 * q_head * output[dim ^ 1]
    return mixed + 0.5 * kv_head + q_pos / 256 - request


def sink(q_head: Any, kv_head: Any, q_pos: Any, request: Any) -> Any:
    return SINKS[q_head] + (q_pos & 3) - request + kv_head


FUNCTIONS = {
    "query_transform": query_transform,
    "key_transform": key_transform,
    "value_transform": value_transform,
    "logits_transform": logits_transform,
    "logits_mask": logits_mask,
    "output_transform": output_transform,
    "sink": sink,
}
SPELLED = {name: Variant(f"py_{name}", right=0, **{name: function}) for name, function in FUNCTIONS.items()}
SIGMOID = Variant(
    "py_sigmoid", right=0, use_softmax=False, logits_transform=lambda logits: torch.sigmoid(logits + BIAS)
)

ALL_HOOKS = Hooks(**{name: getattr(HOOKS[name].hooks, name) for name in FUNCTIONS})
ALL_IN_PYTHON = Variant("py_all", right=0, **FUNCTIONS)
# The hooks of a pair act on different things, so any order of the two spellings is the same attention.
IN_CPP = ("query_transform", "value_transform", "logits_mask", "sink")
MIXED = Variant("cpp_and_py", right=0)
MIXED_PARAMS: dict[str, Any] = {}
for _name in FUNCTIONS:
    MIXED = MIXED & (HOOKS[_name].variant if _name in IN_CPP else SPELLED[_name])
    MIXED_PARAMS |= HOOKS[_name].params if _name in IN_CPP else {}

QO_LENS, KV_LENS = [1, 12, 40, 2], [300, 12, 170, 64]


@cache
def _engine(variant: Variant) -> Attention:
    build([attention_spec("cpu", torch.float32, 64, 64, v) for v in (*SPELLED.values(), SIGMOID, ALL_IN_PYTHON, MIXED)])
    return Attention(NUM_QO_HEADS, NUM_KV_HEADS, 64, dtype=torch.float32, variant=variant)


@cache
def _problem() -> Problem:
    return make_problem(QO_LENS, KV_LENS, num_qo_heads=NUM_QO_HEADS, num_kv_heads=NUM_KV_HEADS, seed=11)


def _check(variant: Variant, case: Case, num_workers: int) -> None:
    problem = _problem()
    answer = problem.answer(case.band, case.hooks)
    engine = _engine(variant)
    if num_workers > 1:
        assert engine.plan(problem.qo_indptr, problem.layout, num_workers=num_workers).num_splits > 1
    check(engine, problem, answer, num_workers=num_workers, params=case.params, slope=case.slope)


@pytest.mark.parametrize("num_workers", [1, 7])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_hook_in_python(name: str, num_workers: int) -> None:
    _check(SPELLED[name], dataclasses.replace(HOOKS[name], params={}), num_workers)


def test_sigmoid_in_python() -> None:
    problem = _problem()
    engine = _engine(SIGMOID)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=7)
    out = engine.run(plan, problem.q, problem.k_cache, problem.v_cache)
    assert_out(out, problem.answer(HOOKS["sigmoid"].band, HOOKS["sigmoid"].hooks), 64, torch.float32)


@pytest.mark.parametrize("num_workers", [1, 7])
@pytest.mark.parametrize(("variant", "params"), [(ALL_IN_PYTHON, {}), (MIXED, MIXED_PARAMS)], ids=["python", "mixed"])
def test_all_hooks_together(variant: Variant, params: dict[str, Any], num_workers: int) -> None:
    everything = Case(variant, ALL_HOOKS, params, slope=cases.OUTPUT.slope)
    _check(variant, everything, num_workers)


def test_the_spellings_are_different_texts_of_the_same_hooks() -> None:
    for name in FUNCTIONS:
        assert HOOKS[name].variant.texts(name) != SPELLED[name].texts(name) != ()
