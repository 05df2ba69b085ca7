"""One row: everyone's times in turns, everyone's error, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from report import Row, Target
from torch import Tensor

from gpu.case import Case, Runner
from gpu.ceilings import Ceilings
from gpu.ours import ours
from gpu.peers import PEERS, first_line
from gpu.plain_read import plain_read
from gpu.rows import ROWS
from gpu.timing import Captured, graph_of, median, replay_times

WORST_ERROR = 1e-2
ERROR_LIMIT = 1.1  # ours over FA3's
READ = "a plain read"


class Failed(RuntimeError):
    """Ours did not run, or was wrong."""


class Measured(NamedTuple):
    """A row's times in us, ascending, and relative errors by name, and why those that are absent are.

    ``read``: times of a kernel that only reads as many bytes, in the same turns; empty where products take the time.
    """

    times: dict[str, list[float]]
    errors: dict[str, float]
    absent: dict[str, str]
    read: list[float]


def measure(name: str, peers: Sequence[str], absent: Mapping[str, str], repeats: int, with_ours: bool) -> Measured:
    """Run a row; ``absent`` names peers that are missing altogether.

    Raises:
        Failed: ours did not run, was wrong, or was not the same twice. A peer's failure makes it absent.
    """
    torch.manual_seed(0)
    case = Case.create(ROWS[name])
    absent = {peer: absent[peer] for peer in peers if peer in absent}
    runners: dict[str, Runner] = {}
    graphs: dict[str, Captured] = {}
    first: Tensor | None = None
    for who in (["ours"] if with_ours else []) + [peer for peer in peers if peer not in absent]:
        try:
            runner = ours(case) if who == "ours" else PEERS[who].prepare(case)
            runner.run()  # whatever compiles at the first launch does it now
            torch.cuda.synchronize()
            if who == "ours":
                first = runner.out.clone()
            graphs[who], runners[who] = graph_of(runner.run), runner
        except Exception as error:
            _check_device(name, who)
            if who == "ours":
                raise Failed(f"{name}: {first_line(error)}") from error
            absent[who] = first_line(error)
    for runner in runners.values():
        runner.out.fill_(torch.nan)
    if case.shape.reads:
        graphs[READ] = graph_of(plain_read(case.shape.kv_bytes, case.q.device))
    times = replay_times(graphs, repeats)
    read = times.pop(READ, [])
    errors = {who: case.error(runner.out) for who, runner in runners.items()}
    if first is not None:
        if not errors["ours"] < WORST_ERROR:
            raise Failed(f"{name}: relative error {errors['ours']}")
        if not torch.equal(first, runners["ours"].out):
            raise Failed(f"{name}: two runs differ")
    for peer in [who for who in runners if not errors[who] < WORST_ERROR]:
        absent[peer] = f"relative error {errors.pop(peer)}"
        del times[peer]
    return Measured(times, errors, absent, read)


def _check_device(name: str, who: str) -> None:
    """End the program where nothing can be launched any more; the file has the rows before this one."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise SystemExit(f"{name}: {who} broke the device: {first_line(error)}; run again without it") from error


def row_of(name: str, found: Measured, limits: Ceilings) -> Row:
    """What is kept of a measurement."""
    shape, times, errors = ROWS[name], found.times, dict(found.errors)
    medians = {who: median(each) for who, each in times.items()}
    us = medians.pop("ours")
    floor = limits.floor_us(shape)
    ratio = us / min(medians.values()) if medians else None
    error = errors.pop("ours")
    detail: dict[str, Any] = {
        "error": error,
        "peers_error": errors,
        "kv_bytes": shape.kv_bytes,
        "flops": shape.flops,
        "tb_per_s": shape.kv_bytes / us / 1e6,
        "tflop_per_s": shape.flops / us / 1e6,
        "floor_us": floor,
        "share": floor / us,
        "fastest_us": {who: each[0] for who, each in times.items()},
        "repeats": len(times["ours"]),
        "peers_absent": found.absent,
    }
    if found.read:
        detail["plain_read_us"] = median(found.read)
        detail["over_plain_read"] = us / detail["plain_read_us"]
    if "FA3" in errors:
        detail["error_over_fa3"] = error / errors["FA3"]
        detail["error_met"] = detail["error_over_fa3"] <= ERROR_LIMIT
    return Row(name, us, "us", medians, ratio, Target("ratio", shape.target), detail)
