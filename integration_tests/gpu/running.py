"""Runs a drawn case on the engine and compares everything it wrote, and did not write, with the oracle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnloom import Attention, finish_state, merge_states
from attnloom.core.plan import Plan
from integration_tests.gpu.arena_memory import assert_no_arrivals, poison_arena
from integration_tests.gpu.batch import SPARE_ROWS, Batch, Output, make_batch
from integration_tests.gpu.cases import Case
from integration_tests.gpu.kernels import Kernel, engine_of
from integration_tests.gpu.oracle import Answer, Scales, attention
from integration_tests.gpu.storage import DEVICE, bits
from integration_tests.gpu.tolerance import Bounds, bounds, check_lse, check_rows


def check_case(kernel: Kernel, case: Case) -> None:
    """Raises AssertionError, which names the case, where the engine and the oracle differ."""
    try:
        _check(kernel, case)
    except Exception as error:
        raise AssertionError(f"{error}\n{kernel}: {case}") from error


def _check(kernel: Kernel, case: Case) -> None:
    batch = make_batch(kernel, case)
    engine = engine_of(kernel, case.num_qo_heads, case.num_kv_heads, case.left, case.right)
    plan = plan_of(engine, case, batch)
    scale = kernel.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    scales = Scales(scale, case.k_scale, case.v_scale)
    hooks = kernel.case.hooks(batch.shape, batch.params)
    band = (case.left, case.right)
    answers = [attention(r, request, band, hooks, scales) for r, request in enumerate(batch.requests)]
    answer = Answer.joined(answers)
    limit = Bounds.joined([bounds(answer, hooks, kernel.dtype) for answer in answers])

    softmax = engine.variant.use_softmax
    total = case.total_q
    first, first_lse = _launch(engine, case, batch, plan)
    second, second_lse = _launch(engine, case, batch, plan)
    assert torch.equal(bits(first), bits(second)), "a second run has other bits"
    if first_lse is not None and second_lse is not None:
        assert torch.equal(bits(first_lse[:total]), bits(second_lse[:total])), "a second run has other bits in its LSE"
    if case.mode != "state":
        check_rows("out", first[:total], answer.out, limit.out, answer)
        if first_lse is not None:
            check_lse("lse", first_lse[:total], answer.lse, limit.lse)
        return
    check_rows("state", first[:total], answer.state, limit.state, answer)
    if softmax:
        assert first_lse is not None
        check_lse("state's lse", first_lse[:total], answer.state_lse, limit.lse)
    out, lse = _finished(engine, batch, plan, first, first_lse)
    check_rows("finished", out[:total], answer.out, limit.out, answer)
    if lse is not None:
        check_lse("finished lse", lse[:total], answer.lse, limit.lse)


def plan_of(engine: Attention, case: Case, batch: Batch) -> Plan:
    """The plan as the case wants it made."""
    params = batch.params or None
    mask = None
    if case.block_mask:
        longest = max([1, *case.planned, *case.kv_lens])
        mask = engine.block_mask(longest, num_requests=len(case.kv_lens), params=params)
    host = torch.tensor(case.planned, dtype=torch.int32)
    common = {"num_workers": case.num_workers, "params": params, "block_mask": mask}
    if case.planner == "device":
        return engine.plan(
            batch.indptr().to(DEVICE),
            batch.layout,
            kv_lens=host.to(DEVICE),
            total_q=case.total_q + case.seed % (SPARE_ROWS + 1),
            **common,
        )
    plan = engine.plan(batch.indptr(), batch.layout, kv_lens=host.flip(0), **common)
    if case.planner == "into":
        return engine.plan(batch.indptr(), batch.layout, kv_lens=host, into=plan, **common)
    return engine.plan(batch.indptr(), batch.layout, kv_lens=host, **common)


def _launch(engine: Attention, case: Case, batch: Batch, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Rows and LSE; no other memory has changed."""
    state = case.mode == "state"
    dtype = torch.float32 if state else engine.dtype
    output = Output(case.total_q + SPARE_ROWS, engine.num_qo_heads, engine.head_dim, dtype)
    poison_arena()
    result = engine.run(
        plan,
        batch.q,
        batch.k_cache,
        batch.v_cache,
        sm_scale=case.sm_scale,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        params=batch.params or None,
        out=output.view,
        return_lse=case.mode == "lse" and engine.variant.use_softmax,
        return_state=state,
    )
    output.assert_untouched(case.total_q)
    assert_no_arrivals()
    return (output.view, None) if isinstance(result, Tensor) else (output.view, result[1])


def _finished(
    engine: Attention, batch: Batch, plan: Plan, state: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The state, merged with that of no keys, as finished rows."""
    state = state[: plan.total_q]
    nothing = torch.full_like(state, 0.0 if lse is None else math.nan)
    lses = None if lse is None else torch.stack([lse, torch.full_like(lse, -math.inf)])
    merged, merged_lse = merge_states(torch.stack([state, nothing]), lses)
    softmax = engine.variant.use_softmax
    done = finish_state(engine, plan, merged, merged_lse, params=batch.params or None, return_lse=softmax)
    return (done, None) if isinstance(done, Tensor) else done
