"""Declared ranges and block masks on a GPU: planned there, equal to what the host makes of the same hooks."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from attnloom import Attention, Variant, variants
from attnloom.core.kernels import attention_module, attention_spec
from attnloom.core.params import Value, pack
from attnloom.core.plan import Plan
from attnloom.core.plan_input import DeclaredRange
from attnloom.core.planner import plan_scan
from integration_tests.gpu.planning import arrays
from integration_tests.gpu.problem import HEAD_DIM, NUM_KV_HEADS, NUM_QO_HEADS, Problem, engine_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def host_plan(engine: Attention, problem: Problem, like: Plan, values: list[Value]) -> Plan:
    """What the host planner makes with the hook compiled for the CPU."""
    module = attention_module(attention_spec("cpu", torch.float32, 64, 64, engine.variant))
    return plan_scan(
        torch.tensor([0, *accumulate(problem.qo_lens)], dtype=torch.int32),
        torch.tensor(problem.kv_lens, dtype=torch.int32),
        like.key,
        num_workers=like.num_workers,
        lockstep=like.lockstep,
        costs=engine.tiles.costs,
        ranges=DeclaredRange(module, pack(engine.variant.params, values)),
        tile_capacity=like.tile_capacity,
    )


def cases(variant: Variant, problem: Problem) -> dict[str, torch.Tensor]:
    """Parameters of the variants tested here, on the host."""
    if variant.name == "prefix_lm":
        return {"prefix_lengths": torch.tensor([length // 3 for length in problem.kv_lens], dtype=torch.int32)}
    if variant.name == "document_mask":
        rng = random.Random(0)
        lengths = []
        for length in problem.kv_lens:
            parts, left = [], length
            while left > 0:
                parts.append(min(left, rng.randint(1, 500)))
                left -= parts[-1]
            lengths.append(parts or [1])
        return variants.documents(lengths)
    return {}


@pytest.mark.parametrize(
    "variant", [variants.ChunkedLocal(300), variants.PrefixLM(), variants.DocumentMask()], ids=lambda v: v.name
)
def test_plans_equal_the_hosts(variant: Variant) -> None:
    engine = engine_of(variant)
    for qo_lens, kv_lens in (
        ([1] * 5, [3000, 0, 64, 1, 2500]),
        ([300, 1, 70], [900, 3000, 70]),
        ([4] * 4, [5, 100, 1000, 3000]),
        ([1, 2900, 0, 4, 2900, 1, 300], [70, 2900, 9, 900, 3000, 3000, 301]),
    ):
        problem = Problem(qo_lens, kv_lens, longest=3000)
        host = cases(variant, problem)
        params: dict[str, Value] = {name: value.cuda() for name, value in host.items()}
        by_device = engine.plan(
            problem.indptr, problem.layout, total_q=problem.total_q, max_q=max(qo_lens), params=params
        )
        by_copy = engine.plan(
            problem.indptr.cpu(), problem.layout, kv_lens=torch.tensor(kv_lens, dtype=torch.int32), params=params
        )
        values: list[Value] = [
            host[param.name] if param.name in host else engine.variant.captures[param.name]
            for param in engine.variant.params
        ]
        expected = arrays(host_plan(engine, problem, by_device, values))
        assert torch.equal(arrays(by_device), expected)
        assert torch.equal(arrays(by_copy), expected)
        out = engine.run(by_device, problem.q, problem.k, problem.v, params=params)
        again = engine.run(by_copy, problem.q, problem.k, problem.v, params=params)
        assert torch.equal(out, again)
        torch.testing.assert_close(out.float(), on_the_cpu(engine, problem, host), atol=2e-2, rtol=2e-2)


def on_the_cpu(engine: Attention, problem: Problem, params: dict[str, torch.Tensor]) -> torch.Tensor:
    """The cpu family's result in float32."""
    cpu = Attention(NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float32, variant=engine.variant)
    layout = problem.layout.to("cpu")
    plan = cpu.plan(problem.indptr.cpu(), layout, params=params)
    out = cpu.run(plan, problem.q.cpu().float(), problem.k.cpu().float(), problem.v.cpu().float(), params=params)
    return out.cuda()


@pytest.mark.parametrize("variant", [variants.ChunkedLocal(300), variants.PrefixLM()], ids=lambda v: v.name)
def test_block_masks_equal_the_hosts(variant: Variant) -> None:
    engine = engine_of(variant)
    cpu = Attention(NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float32, variant=variant)
    problem = Problem([200, 1, 64], [900, 1000, 64])
    host = cases(variant, problem)
    params: dict[str, Value] = {name: value.cuda() for name, value in host.items()}
    requests = 3 if host else 1
    mask = engine.block_mask(1000, num_requests=requests, params=params)
    assert torch.equal(mask.kinds.cpu(), cpu.block_mask(1000, num_requests=requests, params=host).kinds)
    plan = engine.plan(problem.indptr, problem.layout, total_q=problem.total_q, params=params, block_mask=mask)
    out = engine.run(plan, problem.q, problem.k, problem.v, params=params)
    torch.testing.assert_close(out.float(), on_the_cpu(engine, problem, host), atol=2e-2, rtol=2e-2)
    assert engine.block_mask(1000, num_requests=requests, params=params) is mask
