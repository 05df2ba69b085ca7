"""Planning into an old plan's buffer, and the arguments that only a GPU's plans take."""

from __future__ import annotations

import pytest
import torch

from tests.core import kernels
from tests.core.problem import make_problem

F32 = kernels.Plain(torch.float32, 64)


def test_into_an_old_plan() -> None:
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    old_problem, problem = make_problem([1, 5, 2], [130, 5, 40]), make_problem([3, 0, 1], [300, 7, 64])
    old = engine.plan(old_problem.qo_indptr, old_problem.layout, num_workers=3)
    address = old.buffer.data_ptr()
    fresh = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3, into=old)
    assert plan.buffer.data_ptr() == address and plan.tile_capacity == old.tile_capacity
    assert str(plan) == str(fresh)
    args = (problem.q, problem.k_cache, problem.v_cache)
    assert torch.equal(engine.run(plan, *args), engine.run(fresh, *args))


def test_a_plan_of_another_shape() -> None:
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    problem, other = make_problem([1, 5, 2], [130, 5, 40]), make_problem([1, 5], [130, 5])
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    with pytest.raises(ValueError, match="into: expected a plan of 2 requests for 3 workers"):
        engine.plan(other.qo_indptr, other.layout, num_workers=3, into=plan)
    with pytest.raises(ValueError, match="into: expected a plan of 3 requests for 2 workers"):
        engine.plan(problem.qo_indptr, problem.layout, num_workers=2, into=plan)
    windowed = kernels.plain_engine(F32, 4, 2, 5, 0)
    with pytest.raises(ValueError, match="into: expected a plan of 3 requests"):
        windowed.plan(problem.qo_indptr, problem.layout, num_workers=3, into=plan)


def test_no_room_for_the_queries() -> None:
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    small, large = make_problem([1, 1], [130, 5]), make_problem([200, 100], [200, 100])
    plan = engine.plan(small.qo_indptr, small.layout, num_workers=3)
    with pytest.raises(ValueError, match=r"qo_indptr\[-1\]=300: expected query tiles for 2, may need"):
        engine.plan(large.qo_indptr, large.layout, num_workers=3, into=plan)


def test_a_bound_where_the_host_knows() -> None:
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    problem = make_problem([1, 5], [130, 5])
    with pytest.raises(ValueError, match=r"total_q=9: expected a bound of qo_indptr\[-1\] where qo_indptr is on a GPU"):
        engine.plan(problem.qo_indptr, problem.layout, total_q=9)


def test_a_plan_on_the_host_is_its_own_host_plan() -> None:
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    problem = make_problem([1, 5], [130, 5])
    plan = engine.plan(problem.qo_indptr, problem.layout)
    assert plan.host() is plan
