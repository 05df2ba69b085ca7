"""Each hook alone, under a plan that splits rows: the result changes as the oracle says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnloom.core.hook_text import keys_by_column
from tests.core import kernels
from tests.core.problem import Problem, make_problem
from tests.core.running import check
from tests.core.variant_cases import CHAIN, HOOKS, SIGMOID, Case
from tests.oracle import Answer, Band, Hooks
from tests.tolerance import assert_out, out_error

QO_LENS, KV_LENS = [1, 12, 40, 2], [300, 12, 170, 64]
WITH_SOFTMAX = {name: case for name, case in HOOKS.items() if case.variant.use_softmax}
WITHOUT_SOFTMAX = {name: case for name, case in HOOKS.items() if not case.variant.use_softmax}


def _problem() -> Problem:
    return make_problem(QO_LENS, KV_LENS, num_qo_heads=6, num_kv_heads=2, block_size=16, seed=11)


def _assert_hook_matters(problem: Problem, answer: Answer) -> None:
    """The test can fail: without the hook the oracle's answer is another one."""
    plain = problem.answer()
    assert (abs(plain.out - answer.out) > 100 * out_error(answer, 64, torch.float32)).any()


def _assert_split(case: Case, problem: Problem, num_workers: int) -> None:
    plan = kernels.engine_of(case.variant).plan(problem.qo_indptr, problem.layout, num_workers=num_workers)
    assert plan.num_splits > 1, "the plan splits nothing: the test would not see a merge"


@pytest.mark.parametrize("num_workers", [1, 7, 40])
@pytest.mark.parametrize("name", WITH_SOFTMAX)
def test_hook(name: str, num_workers: int) -> None:
    case, problem = HOOKS[name], _problem()
    answer = problem.answer(case.band, case.hooks)
    _assert_hook_matters(problem, answer)
    if num_workers > 1:
        _assert_split(case, problem, num_workers)
    engine = kernels.engine_of(case.variant)
    check(engine, problem, answer, num_workers=num_workers, params=case.params, slope=case.slope)


@pytest.mark.parametrize("num_workers", [1, 7, 40])
@pytest.mark.parametrize("name", WITHOUT_SOFTMAX)
def test_without_softmax(name: str, num_workers: int) -> None:
    """Weights are the transformed logits; a masked key weighs nothing, whatever the transform makes of it."""
    case, problem = HOOKS[name], _problem()
    answer = problem.answer(case.band, case.hooks)
    _assert_hook_matters(problem, answer)
    if num_workers > 1:
        _assert_split(case, problem, num_workers)
    engine = kernels.engine_of(case.variant)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=num_workers)
    out = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params=case.params)
    assert isinstance(out, torch.Tensor)
    assert_out(out, answer, 64, torch.float32)


@pytest.mark.parametrize("num_workers", [1, 7])
def test_hooks_of_composed_variants_act_left_to_right(num_workers: int) -> None:
    problem = _problem()
    answer = problem.answer(CHAIN.band, CHAIN.hooks)
    engine = kernels.engine_of(CHAIN.variant)
    check(engine, problem, answer, num_workers=num_workers, params=CHAIN.params, slope=CHAIN.slope)


def test_the_cases_of_key_hooks_take_both_loops() -> None:
    """csrc/cpu/transform.h: over the tokens of a strip, over the dimensions of a row."""
    loops = {name: keys_by_column(HOOKS[name].variant.key_transform) for name in HOOKS if name.startswith("key")}
    assert loops == {"key_transform": True, "key_transform by token": False}


@pytest.mark.parametrize("name", ["key_transform", "key_transform by token"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_a_key_hook_reads_no_slot_outside_a_window(name: str, block_size: int) -> None:
    """NaN lies left of the window and past the end, in tiles of which part is read."""
    case, band = HOOKS[name], Band(89, 0)
    problem = make_problem(
        [1, 20, 3], [300, 211, 70], num_qo_heads=6, num_kv_heads=2, block_size=block_size, readable=band
    )
    engine = kernels.engine_of(dataclasses.replace(case.variant, left=band.left))
    check(engine, problem, problem.answer(band, case.hooks), num_workers=4, params=case.params)


def test_scales_apply_before_the_hooks() -> None:
    """K and V hooks see dequantised values; the logits hook sees the scaled product."""
    for name in ("key_transform", "key_transform by token", "value_transform", "logits_transform"):
        case, problem = HOOKS[name], _problem()
        scales = {"sm_scale": 0.2, "k_scale": 0.5, "v_scale": 3.0}
        answer = problem.answer(case.band, case.hooks, **scales)
        check(kernels.engine_of(case.variant), problem, answer, num_workers=7, params=case.params, **scales)


def test_hooks_see_rows_that_have_no_key() -> None:
    """output_transform acts on O = 0; a sink leaves O = 0 and is the whole LSE."""
    problem = make_problem([3, 2], [0, 1], num_qo_heads=6, num_kv_heads=2)
    for name in ("output_transform", "sink"):
        case = HOOKS[name]
        answer = problem.answer(case.band, case.hooks)
        check(kernels.engine_of(case.variant), problem, answer, params=case.params, slope=case.slope)


def test_a_parameter_is_read_at_run_time() -> None:
    """One kernel, one plan, two values of a scalar."""
    problem, case = _problem(), SIGMOID
    engine = kernels.engine_of(case.variant)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=7)
    for bias in (-1.5, 0.75):
        hooks = Hooks(
            logits_transform=lambda logits, at, b=bias: 1 / (1 + 2.718281828459045 ** -(logits + b)), use_softmax=False
        )
        out = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params={"bias": bias})
        assert isinstance(out, torch.Tensor)
        assert_out(out, problem.answer(case.band, hooks), 64, torch.float32)
