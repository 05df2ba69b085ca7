"""Host times on CPUs that nobody else uses.

A virtual machine's CPU is half of a core whose other half may be somebody else's, and then everything takes 1.5 to 1.9
times as long, for seconds. So every CPU measures all rows in turn, and those count where a fixed piece of Python ran as
fast as anywhere, before the rows and after them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WITHIN = 1.1  # of the least time of the fixed piece
RUNS = 300


@dataclass(frozen=True)
class Turn:
    """What a CPU found.

    Attributes:
        cpu: its number.
        yardstick_us: of the fixed piece of Python, the longer of before and after.
        rows: microseconds by name.
    """

    cpu: int
    yardstick_us: float
    rows: dict[str, float]


def yardstick_us() -> float:
    """Microseconds that a fixed piece of Python takes, the median of many times."""
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter_ns()
        seen = {}
        for i in range(64):
            seen[i & 7] = (i, i + 1)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def turns(measure: Callable[[], dict[str, float]], rounds: int) -> list[Turn]:
    """``measure`` on each CPU of the calling thread, ``rounds`` times; afterwards it may use them all again."""
    cpus = os.sched_getaffinity(0)
    found = []
    try:
        for cpu in sorted(cpus) * rounds:
            os.sched_setaffinity(0, {cpu})
            before = yardstick_us()
            rows = measure()
            found.append(Turn(cpu, max(before, yardstick_us()), rows))
    finally:
        os.sched_setaffinity(0, cpus)
    return found


def quiet(found: Sequence[Turn]) -> list[Turn]:
    """The turns during which the CPU was as fast as any; at least one."""
    least = min(turn.yardstick_us for turn in found)
    return [turn for turn in found if turn.yardstick_us <= WITHIN * least]


def summary(name: str, found: Sequence[Turn]) -> tuple[float, dict[str, float]]:
    """A row's median over the quiet turns, and what it was over all of them."""
    every = sorted(turn.rows[name] for turn in found)
    us = statistics.median(turn.rows[name] for turn in quiet(found))
    return us, {"least_us": every[0], "median_us_of_all_turns": statistics.median(every), "most_us": every[-1]}
