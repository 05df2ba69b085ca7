"""CUDA graphs: the plan is made anew at each replay, from lengths that never leave the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnloom import variants
from attnloom.core.plan import Plan
from integration_tests.gpu.problem import NUM_KV_HEADS, Problem, engine_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LONG = 32_768


def captured(function: Callable[[], object], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A graph of what ``function`` launches; nothing was run before, so nothing may be loaded inside."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph


class Step:
    """A captured step: the planner, then one layer or more."""

    def __init__(self, problem: Problem, layers: int = 1, stream: torch.cuda.Stream | None = None) -> None:
        self.problem, self.engine = problem, engine_of()
        self.outs = [torch.full_like(problem.q, 7.0) for _ in range(layers)]
        self.plan: Plan | None = None
        self.graph = captured(self._launch, stream)

    def _launch(self) -> None:
        self.plan = self.problem.device_plan(self.engine, total_q=self.problem.q.shape[0])
        for out in self.outs:
            self.problem.run(self.engine, self.plan, out)

    def replay(self, qo_lens: list[int], kv_lens: list[int]) -> None:
        self.problem.set(qo_lens, kv_lens)
        for out in self.outs:
            out.fill_(7.0)
        self.graph.replay()
        for out in self.outs:
            self.problem.check(out)

    @property
    def splits(self) -> int:
        assert self.plan is not None
        return self.plan.host().num_splits


def test_captured_short_replayed_long_and_back() -> None:
    """No item is split at length 1, all are at 32k: grid, addresses and sizes stay."""
    step = Step(Problem([1] * 4, [1] * 4, longest=LONG))
    step.replay([1] * 4, [1] * 4)
    assert step.splits == 0
    step.replay([1] * 4, [LONG] * 4)
    assert step.splits > 0
    step.replay([1] * 4, [1] * 4)
    step.replay([1] * 4, [LONG, 1, 700, 0])


def test_captured_long_replayed_short() -> None:
    step = Step(Problem([1] * 4, [LONG] * 4, longest=LONG))
    step.replay([1] * 4, [LONG] * 4)
    most = step.splits
    step.replay([1] * 4, [1] * 4)
    assert step.splits == 0 < most


def test_one_request_in_most_pieces() -> None:
    """All workers share one item of each kv head."""
    step = Step(Problem([1], [1], longest=LONG))
    step.replay([1], [LONG])
    assert step.plan is not None and step.splits == NUM_KV_HEADS
    assert int(step.plan.split_end.max()) == step.plan.num_workers // step.plan.lockstep - 1
    step.replay([1], [3])
    assert step.splits == 0


def test_rows_of_length_zero_and_padded_rows() -> None:
    """Requests without keys give 0; requests without queries, and rows past the queries, are left alone."""
    step = Step(Problem([1] * 8, [1] * 8, longest=2000, rows=12))
    step.replay([1] * 8, [0, 1, 0, 2000, 17, 0, 64, 5])
    step.replay([1, 1, 1, 0, 0, 0, 0, 0], [9, 1500, 2, 0, 0, 0, 0, 0])
    step.replay([0] * 8, [5] * 8)
    step.replay([1] * 8, [0] * 8)


def test_verify_and_mixed_lengths() -> None:
    step = Step(Problem([4, 4, 4], [900, 70, 5], longest=3000, rows=300))
    step.replay([4, 1, 3], [3000, 1, 4])
    step.replay([200, 1, 0], [200, 3000, 7])
    step.replay([1, 1, 1], [64, 128, 129])


def test_layers_share_the_plan() -> None:
    step = Step(Problem([1] * 3, [5] * 3, longest=9000), layers=6)
    step.replay([1] * 3, [9000, 8000, 63])
    for out in step.outs[1:]:
        assert torch.equal(out, step.outs[0])


def test_a_replay_equals_an_eager_step_bitwise() -> None:
    problem = Problem([1] * 5, [1] * 5, longest=7000)
    step = Step(problem)
    step.replay([1] * 5, [7000, 6000, 129, 64, 1])
    by_host, by_device = (torch.empty_like(problem.q) for _ in range(2))
    problem.run(step.engine, problem.host_plan(step.engine), by_host)
    problem.run(step.engine, problem.device_plan(step.engine), by_device)
    assert torch.equal(by_host, step.outs[0]) and torch.equal(by_device, step.outs[0])


def test_graphs_engines_and_streams_side_by_side() -> None:
    """Graphs captured on one stream are replayed on several at once, beside eager launches of two engines."""
    problems = [Problem([1] * 3, [1] * 3, longest=LONG) for _ in range(4)]
    steps = [Step(problem) for problem in problems]
    window = engine_of(variants.SlidingWindow(100))
    for index, problem in enumerate(problems):
        problem.set([1] * 3, [LONG - index, 20_000 + index, 100 * index])
    eager = Problem([1] * 3, [LONG] * 3, longest=LONG)
    expected = eager.run(engine_of(), eager.device_plan(engine_of()), torch.empty_like(eager.q))
    windowed = eager.run(window, eager.device_plan(window), torch.empty_like(eager.q))
    streams = [torch.cuda.Stream() for _ in range(len(steps) + 2)]
    torch.cuda.synchronize()
    for _ in range(30):
        outs = []
        for step, stream in zip(steps, streams, strict=False):
            with torch.cuda.stream(stream):
                step.graph.replay()
        for engine, stream in ((engine_of(), streams[-1]), (window, streams[-2])):
            with torch.cuda.stream(stream):
                outs.append(eager.run(engine, eager.device_plan(engine), torch.empty_like(eager.q)))
        torch.cuda.synchronize()
        assert torch.equal(outs[0], expected) and torch.equal(outs[1], windowed)
    for step in steps:
        step.problem.check(step.outs[0])


def test_a_larger_engine_after_a_capture() -> None:
    """What a captured graph holds stays when an engine that needs more room comes along."""
    step = Step(Problem([1] * 2, [1] * 2, longest=LONG))
    engine = engine_of()
    problem = Problem([1] * 2, [LONG] * 2, longest=LONG)
    out = torch.empty_like(problem.q)
    problem.run(engine, engine.plan(problem.indptr, problem.layout, total_q=2, num_workers=4 * engine.workers()), out)
    trash = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    step.replay([1] * 2, [LONG, LONG - 1])
    del trash
    torch.testing.assert_close(out.double(), problem.expected(), atol=2e-2, rtol=2e-2)


def test_a_captured_layer_with_a_plan_from_outside() -> None:
    """A framework whose builder runs outside of the graph plans into the buffer that the graph reads."""
    engine = engine_of()
    problem = Problem([1] * 3, [1] * 3, longest=5000)
    plan = problem.host_plan(engine)
    graph = captured(lambda: problem.run(engine, plan))
    for kv_lens in ([5000, 4000, 1], [1, 1, 1], [64, 0, 5000]):
        problem.set([1] * 3, kv_lens)
        problem.host_plan(engine, into=plan)
        graph.replay()
        problem.check()
        engine.plan(problem.indptr, problem.layout, total_q=3, into=plan)
        problem.out.fill_(7.0)
        graph.replay()
        problem.check()


def test_a_declared_range_is_planned_in_the_graph() -> None:
    """The variant's own planner, with parameters that change between replays."""
    engine = engine_of(variants.PrefixLM())
    problem = Problem([3, 1], [900, 5], longest=900)
    prefix = torch.tensor([10, 1], dtype=torch.int32, device="cuda")
    params = {"prefix_lengths": prefix}

    def step(out: Tensor) -> None:
        plan = engine.plan(problem.indptr, problem.layout, total_q=4, params=params)
        engine.run(plan, problem.q, problem.k, problem.v, params=params, out=out)

    graph = captured(lambda: step(problem.out))
    for lengths in ([900, 1], [0, 5], [300, 0]):
        prefix.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = torch.empty_like(problem.out)
        step(expected)
        assert torch.equal(problem.out, expected)


def test_compiled_without_a_break() -> None:
    """torch.compile takes planning from outside and the layer as one operator, also in its own CUDA graphs."""
    torch._dynamo.reset()
    engine = engine_of()
    problem = Problem([1] * 3, [3000, 64, 1])
    plan = problem.device_plan(engine)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return engine.run(plan, q * 1.0, k, v) + 1.0

    expected = layer(problem.q, problem.k, problem.v)
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        for _ in range(3):
            got = compiled(problem.q, problem.k, problem.v)
            assert torch.equal(got, expected)


def test_compiled_with_out() -> None:
    torch._dynamo.reset()
    engine = engine_of()
    problem = Problem([1] * 3, [3000, 64, 1], rows=5)
    plan = problem.device_plan(engine)

    def layer(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        engine.run(plan, q, k, v, out=out)
        return out

    torch.compile(layer, fullgraph=True)(problem.q, problem.k, problem.v, problem.out)
    problem.check()
