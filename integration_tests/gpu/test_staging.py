"""Plans from lengths on the host: nothing waits for the device, and no plan overwrites another's copy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnloom.core.device_plan import plan_from_host
from attnloom.core.plan import Plan
from integration_tests.gpu.planning import Batch, arrays, gpu, layout_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BUSY_CYCLES = 200_000_000  # of the stream before the first copy: about a tenth of a second


def staged(batch: Batch, into: Plan | None = None) -> Plan:
    layout = layout_of(len(batch.qo_lens), batch.positions, batch.key.device)
    return plan_from_host(batch.given("cpu")._replace(layout=layout), into=into)


def batches(count: int) -> list[Batch]:
    rng = random.Random(11)
    made = [Batch(rng, gpu()) for _ in range(count)]
    for batch in made:
        batch.slack = 0
    return made


def test_plans_made_before_the_first_copy_is_done() -> None:
    made = batches(60)
    for _ in range(2):  # the first time torch's allocators may wait for the driver
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(BUSY_CYCLES)
        done.record()
        plans = [staged(batch) for batch in made]
    assert not done.query(), "planning waited for the device, or the device was not kept busy"
    for batch, plan in zip(made, plans, strict=True):
        assert torch.equal(arrays(plan), arrays(batch.host()))


def test_plans_in_the_same_buffer_follow_each_other() -> None:
    """Each plan is copied to where the last one lay; a reader between two of them sees the first."""
    rng = random.Random(5)
    first = Batch(rng, gpu())
    first.qo_lens, first.kv_lens, first.slack, first.positions = [1] * 50, [100] * 50, 0, False
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(BUSY_CYCLES)
    done.record()
    plan = staged(first)
    read, expected = [], []
    for _ in range(20):
        first.kv_lens = [rng.randint(0, 5000) for _ in range(50)]
        plan = staged(first, into=plan)
        read.append(replace(plan, buffer=plan.buffer.clone()))
        expected.append(arrays(first.host()))
    assert not done.query()
    for got, wanted in zip(read, expected, strict=True):
        assert torch.equal(arrays(got), wanted)


def test_no_host_plan_inside_a_capture() -> None:
    batch = batches(1)[0]
    staged(batch)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="expected lengths on the device while a CUDA graph"), torch.cuda.graph(graph):
        staged(batch)
