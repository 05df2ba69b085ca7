"""Runs the engine into a poisoned, strided output and compares everything it wrote, and did not write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnloom.core.attention import Attention
from tests.core.problem import SPARE_QUERY_ROWS, Problem
from tests.core.storage import poisoned
from tests.oracle import Answer
from tests.tolerance import assert_lse, assert_out


def strided_out(problem: Problem, engine: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer, view): the view is `out` with gaps between its heads and rows and spare rows after the last query."""
    rows = problem.total_q + SPARE_QUERY_ROWS
    buffer = poisoned(rows, engine.num_qo_heads + 1, engine.head_dim_v + 8, dtype=engine.dtype)
    return buffer, buffer[:, 1:, : engine.head_dim_v]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def assert_untouched(buffer: torch.Tensor, view: torch.Tensor, total_q: int) -> None:
    """Nothing but rows [0, total_q) of `view` was written."""
    before, restored = poisoned(*buffer.shape, dtype=buffer.dtype), buffer.clone()
    written, original = (
        whole.as_strided(view.shape, view.stride(), view.storage_offset()) for whole in (restored, before)
    )
    written[:total_q] = original[:total_q]
    assert torch.equal(bits(restored), bits(before)), "memory outside the rows of the batch was written"


def run(
    engine: Attention,
    problem: Problem,
    *,
    num_workers: int | None = None,
    upper_bounds: list[int] | None = None,
    params: Mapping[str, Any] | None = None,
    **scales: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [total_q, Hq, Dv], lse [total_q, Hq]) of the batch. `upper_bounds`: what the planner believes."""
    kv_lens = None if upper_bounds is None else torch.tensor(upper_bounds, dtype=torch.int32)
    plan = engine.plan(problem.qo_indptr, problem.layout, kv_lens=kv_lens, num_workers=num_workers)
    buffer, out = strided_out(problem, engine)
    result, lse = engine.run(
        plan, problem.q, problem.k_cache, problem.v_cache, params=params, out=out, return_lse=True, **scales
    )
    assert result.data_ptr() == out.data_ptr(), "run() returned another tensor than `out`"
    assert_untouched(buffer, out, problem.total_q)
    return out[: problem.total_q], lse[: problem.total_q]


def check(
    engine: Attention,
    problem: Problem,
    answer: Answer,
    *,
    num_workers: int | None = None,
    upper_bounds: list[int] | None = None,
    params: Mapping[str, Any] | None = None,
    slope: float = 1.0,
    **scales: float,
) -> None:
    """Runs the batch and compares output and LSE with the oracle's answer."""
    out, lse = run(engine, problem, num_workers=num_workers, upper_bounds=upper_bounds, params=params, **scales)
    assert_out(out, answer, engine.head_dim, engine.dtype, slope=slope)
    assert_lse(lse, answer, engine.head_dim)
