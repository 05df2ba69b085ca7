"""What a CUDA engine refuses, before anything runs; and what it looks at only when it is asked to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom import Attention, variants
from integration_tests.gpu.problem import HEAD_DIM, NUM_KV_HEADS, NUM_QO_HEADS, Problem, engine_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def problem() -> Problem:
    return Problem([1, 2], [100, 17])


def refused(match: str, problem: Problem, **other: Any) -> None:
    engine = engine_of()
    arguments = {"plan": problem.device_plan(engine), "q": problem.q, "k_cache": problem.k, "v_cache": problem.v}
    with pytest.raises((TypeError, ValueError), match=match):
        engine.run(**{**arguments, **other})
    problem.run(engine, arguments["plan"])
    problem.check()  # a refusal leaves nothing behind


def test_arguments_of_a_run(problem: Problem) -> None:
    q, k = problem.q, problem.k
    refused("plan: expected a Plan, got NoneType", problem, plan=None)
    refused("q: expected a tensor, got list", problem, q=[1])
    refused(r"q\.device=cpu: expected cuda:0", problem, q=q.cpu())
    refused(r"q\.dtype=torch\.float16: expected torch\.bfloat16", problem, q=q.half())
    refused(r"q\.shape=\(2, 8, 128\): expected \[>= 3, 8, 128\]", problem, q=q[:2])
    refused(r"q\.data_ptr\(\)=.*: expected a multiple of 16 bytes", problem, q=shifted(q))
    refused("k_cache: expected a tensor, got NoneType", problem, k_cache=None)
    refused(r"v_cache\.device=cpu: expected cuda:0", problem, v_cache=k.cpu())
    refused(r"k_cache\.shape=.*: expected \[num_blocks, 16, 2, 128\]", problem, k_cache=k[:, :8])
    refused(r"k_cache\.data_ptr\(\)=.*: expected a multiple of 16 bytes", problem, k_cache=shifted(k))
    refused(r"out\.dtype=torch\.float32: expected torch\.bfloat16", problem, out=q.float())
    refused(r"out\.shape=\(1, 8, 128\)", problem, out=q[:1])
    refused(r"sm_scale=nan: expected a finite number", problem, sm_scale=float("nan"))
    refused(r"k_scale\.device=cuda:0: expected a number, or a tensor on the host", problem, k_scale=k.new_ones(1))
    refused(r"params=\['sinks'\]: expected \[\]", problem, params={"sinks": q})


def test_the_negative_bit_of_what_was_right_before(problem: Problem) -> None:
    engine = engine_of()
    plan = problem.device_plan(engine)
    engine.run(plan, problem.q, problem.k, problem.v)
    with pytest.raises(ValueError, match=r"q\.is_neg\(\)=True"):
        engine.run(plan, torch._neg_view(problem.q), problem.k, problem.v)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, an element further."""
    wide = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
    return wide[1 : tensor.numel() + 1].view(tensor.shape)


def test_a_plan_of_another_engine(problem: Problem) -> None:
    window = engine_of(variants.SlidingWindow(7))
    refused(r"plan\.key=", problem, plan=problem.device_plan(window))


def test_arguments_of_a_plan(problem: Problem) -> None:
    engine, indptr = engine_of(), problem.indptr
    host = torch.tensor([0, 1, 3], dtype=torch.int32)
    lengths = torch.tensor([100, 17], dtype=torch.int32)
    for match, arguments in (
        (r"kv_lens=None: expected lengths on the host, as qo_indptr", (host, {})),
        (r"total_q=None: expected a bound of qo_indptr\[-1\]", (indptr, {})),
        (r"total_q=3: expected .* else None; qo_indptr\.device=cpu", (host, {"kv_lens": lengths, "total_q": 3})),
        (r"total_q=-1: expected at least 1", (indptr, {"total_q": -1})),
        (r"kv_lens\.device=cpu: expected cuda:0", (indptr, {"total_q": 3, "kv_lens": lengths})),
        (r"kv_lens\.device=cuda:0: expected cpu", (host, {"kv_lens": problem.lengths})),
        (r"qo_indptr\.shape=\(2,\): expected 3 entries", (indptr[:2], {"total_q": 3})),
        (r"qo_indptr\.stride\(\)=\(2,\): expected a contiguous tensor", (indptr.repeat(2)[::2], {"total_q": 3})),
        (r"kv_lens\[1\]=-1: expected at least 0", (host, {"kv_lens": torch.tensor([1, -1], dtype=torch.int32)})),
    ):
        given, named = arguments
        with pytest.raises((TypeError, ValueError), match=match):
            engine.plan(given, problem.layout, **named)
    with pytest.raises(ValueError, match=r"layout\.device=cpu: expected cuda:0"):
        engine.plan(indptr, problem.layout.to("cpu"), total_q=3)


def test_values_are_looked_at_when_asked(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_VALIDATE", "1")
    engine = Attention(NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    plan = problem.device_plan(engine)
    problem.run(engine, plan)
    problem.check()
    with pytest.raises(ValueError, match=r"total_q=2: expected at least qo_indptr\[-1\]=3"):
        problem.device_plan(engine, total_q=2)
    problem.table[1, 0] = 10_000
    with pytest.raises(ValueError, match=r"layout\.indices: block 0 of row 1 is 10000"):
        problem.run(engine, plan)
    problem.lengths[1] = -5
    with pytest.raises(ValueError, match=r"kv_lens\[1\]=-5: expected at least 0"):
        problem.device_plan(engine)


def test_engines_that_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.float32: expected one of .*bfloat16"):
        Attention(8, 2, 128, dtype=torch.float32, device="cuda")
    with pytest.raises(ValueError, match=r"device=cuda:99: expected an index below"):
        Attention(8, 2, 128, dtype=torch.bfloat16, device="cuda:99")
