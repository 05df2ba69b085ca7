"""What attention costs the host on a GPU: a layer by the direct path and by the operator, a plan, a captured plan.

Host time is the clock's over a burst of calls that the device's queue takes without waiting, divided by the calls;
medians over many bursts, on CPUs that nobody else uses at the time (gpu/quiet.py). The planner inside a graph is timed
by events around a graph of many.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu.card import driver
from gpu.quiet import quiet, summary, turns
from report import Row, Target, arguments, publish

from attnloom import Attention, BlockSparseLayout, Variant, append_kv, variants
from attnloom.core.op import op_arguments
from attnloom.core.plan import Plan

BURST = 50  # calls; a stream's queue holds about a thousand launches
BURSTS = 12  # of a row in a turn
TURNS = 2  # of each CPU
PLANNERS = 40  # in a graph
REPLAYS = 60


class Layer:
    """A decode step of a Llama-3.1-8B shape."""

    def __init__(self, requests: int, length: int = 64, variant: Variant | None = None) -> None:
        self.engine = Attention(32, 8, 128, dtype=torch.bfloat16, variant=variant, device="cuda")
        pages = -(-length // 16)
        self.table = torch.arange(requests * pages, dtype=torch.int32, device="cuda").view(requests, pages)
        self.lengths = torch.full((requests,), length, dtype=torch.int32, device="cuda")
        self.layout = BlockSparseLayout.from_page_table(self.table, self.lengths, 16)
        self.indptr = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.host_indptr, self.host_lengths = self.indptr.cpu(), self.lengths.cpu()
        self.k, self.v = torch.randn(2, requests * pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
        self.q = torch.randn(requests, 32, 128, device="cuda", dtype=torch.bfloat16)
        self.new = torch.randn(requests, 8, 128, device="cuda", dtype=torch.bfloat16)
        self.slots = torch.arange(requests, device="cuda") * pages * 16
        self.out = torch.empty_like(self.q)
        self.params = None
        if variant is not None:
            self.params = {"sinks": torch.zeros(32, device="cuda")}
        self.plan = self.device_plan()

    def device_plan(self) -> Plan:
        return self.engine.plan(self.indptr, self.layout, total_q=self.q.shape[0])

    def host_plan(self) -> Plan:
        return self.engine.plan(self.host_indptr, self.layout, kv_lens=self.host_lengths)

    def direct(self) -> Callable[[], object]:
        run, plan, q, k, v, out, params = self.engine.run, self.plan, self.q, self.k, self.v, self.out, self.params
        if params is None:
            return lambda: run(plan, q, k, v, out=out)
        return lambda: run(plan, q, k, v, out=out, params=params)

    def launch(self) -> Callable[[], object]:
        """The direct path's last launch once more: what is left of it without all that Python does before."""
        direct = self.engine.direct
        assert direct is not None
        kernel, argument = direct._kernel, direct._seen.recent[0].argument
        return lambda: kernel(argument)

    def fresh_out(self) -> Callable[[], object]:
        run, plan, q, k, v = self.engine.run, self.plan, self.q, self.k, self.v
        return lambda: run(plan, q, k, v)

    def operator(self) -> Callable[[], object]:
        """As a compiled graph calls it."""
        operator = torch.ops.attnloom.attention.default
        tensors = (self.q, self.k, self.v, self.out, None)
        scales = (128**-0.5, 1.0, 1.0)
        arguments = op_arguments(self.engine, self.plan, self.layout, tensors, (), scales, False)
        return lambda: operator(*arguments)

    def append(self) -> None:
        append_kv(self.new, self.new, self.k, self.v, self.slots)


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of the host for one call, the median burst."""
    for _ in range(BURST):
        call()
    times = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter_ns() - begin) / BURST / 1e3)
    return statistics.median(times)


def in_graph_us(call: Callable[[], object]) -> float:
    """Microseconds of the device for one call in a graph of many, the median replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(PLANNERS)]
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / PLANNERS)
    del kept
    return statistics.median(times)


def host_rows() -> tuple[list[Row], dict[str, Any]]:
    """What calls cost the host, and the turns that say so."""
    layer = Layer(16)
    sinks = Layer(16, variant=variants.Causal() & variants.Sinks())
    layer.direct()()
    calls: dict[str, tuple[Callable[[], object], float | None]] = {
        "engine.run, out=": (layer.direct(), 8),
        "engine.run, out=, sinks": (sinks.direct(), None),
        "engine.run, a new out": (layer.fresh_out(), None),
        "torch.ops.attnloom.attention": (layer.operator(), 15),
        "the launch alone": (layer.launch(), None),
        "append_kv": (layer.append, None),
        "engine.plan, lengths on the device, 16 requests": (layer.device_plan, None),
        "engine.plan, lengths on the host, 16 requests": (layer.host_plan, None),
    }
    found = turns(lambda: {name: host_us(call) for name, (call, _) in calls.items()}, TURNS)
    rows = []
    for name, (_, limit) in calls.items():
        us, detail = summary(name, found)
        rows.append(Row(name, us, target=None if limit is None else Target("ours", limit, "us"), detail=detail))
    counted = [turn.cpu for turn in quiet(found)]
    return rows, {
        "turns": len(found),
        "quiet_turns_of_cpus": counted,
        "yardstick_us": sorted(turn.yardstick_us for turn in found),
    }


def planner_rows() -> list[Row]:
    """The device planner in a graph."""
    rows = []
    for requests in (1, 16, 256, 1000, 5000, 20_000):
        step = Layer(requests)
        target = Target("ours", 15, "us") if requests == 256 else None
        detail = {"plan_bytes": step.plan.buffer.numel() * 4, "splits": step.plan.host().num_splits}
        rows.append(
            Row(
                f"device plan in a graph, {requests} requests",
                in_graph_us(step.device_plan),
                target=target,
                detail=detail,
            )
        )
        del step
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--commit", help="the commit measured, where the copy has no history")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_host_time: expected a CUDA device")
    rows, cpus = host_rows()
    rows += planner_rows()
    card = torch.cuda.get_device_properties(0).name
    more = {"card": card, "driver": driver(), "cuda": torch.version.cuda, "cpus": cpus}
    print(f"{len(cpus['quiet_turns_of_cpus'])} of {cpus['turns']} turns on CPUs that nobody else used")
    publish("gpu_host_time", rows, options.json, more=more, measured=options.commit)


if __name__ == "__main__":
    main()
