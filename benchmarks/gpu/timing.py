"""Medians of CUDA-graph replays, taken in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any card


@dataclass(frozen=True)
class Captured:
    """A graph and the function whose launches are in it, which keeps what they read: a graph knows addresses alone."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], object]

    def replay(self) -> None:
        self.graph.replay()


def graph_of(function: Callable[[], object]) -> Captured:
    """A captured launch, warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return Captured(graph, function)


def replay_times(graphs: Mapping[str, Captured], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each replay, ascending: one of each in turn, the L2 overwritten before every one."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: sorted(each) for name, each in times.items()}


def median(ascending: list[float]) -> float:
    """The upper one of two."""
    return ascending[len(ascending) // 2]
