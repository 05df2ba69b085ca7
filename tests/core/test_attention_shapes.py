"""Each head size, dtype and group on one batch that has a decode, a prefill, an append and a split row."""

from __future__ import annotations

import pytest
import torch

from tests.core import kernels
from tests.core.problem import make_problem
from tests.core.running import check
from tests.core.strategies import GROUPS

QO_LENS = [1, 9, 33, 0, 1, 4]
KV_LENS = [400, 9, 150, 70, 1, 0]


@pytest.mark.parametrize("kernel", kernels.PLAIN, ids=str)
@pytest.mark.parametrize("num_workers", [1, 7])
def test_head_size_and_dtype(kernel: kernels.Plain, num_workers: int) -> None:
    problem = make_problem(
        QO_LENS, KV_LENS, num_qo_heads=6, num_kv_heads=2, head_dim=kernel.head_dim, dtype=kernel.dtype, seed=1
    )
    check(kernels.plain_engine(kernel, 6, 2, None, 0), problem, problem.answer(), num_workers=num_workers)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_group(group: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    heads = group * num_kv_heads
    problem = make_problem([1, 7, 3], [300, 20, 129], num_qo_heads=heads, num_kv_heads=num_kv_heads, dtype=dtype)
    engine = kernels.plain_engine(kernels.Plain(dtype, 64), heads, num_kv_heads, None, 0)
    check(engine, problem, problem.answer(), num_workers=5)


@pytest.mark.parametrize("sm_scale", [0.01, 0.5, -0.3])
def test_sm_scale_is_a_run_time_argument(sm_scale: float) -> None:
    problem = make_problem([1, 6], [90, 200])
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    check(engine, problem, problem.answer(sm_scale=sm_scale), num_workers=3, sm_scale=sm_scale)


def test_k_scale_and_v_scale_are_run_time_arguments() -> None:
    problem = make_problem([1, 6], [90, 200])
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    answer = problem.answer(k_scale=0.25, v_scale=3.0)
    check(engine, problem, answer, num_workers=3, k_scale=0.25, v_scale=3.0)


@pytest.mark.parametrize("amplitude", [30.0, 1e-3])
def test_large_and_small_logits(amplitude: float) -> None:
    """Logits of a few hundred would overflow exp without the running maximum."""
    problem = make_problem([1, 5], [260, 100], amplitude=amplitude)
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    check(engine, problem, problem.answer(), num_workers=4)
