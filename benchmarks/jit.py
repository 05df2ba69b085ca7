"""The JIT: cold build of one CPU kernel, and its load from a warm cache in a fresh process.

    python benchmarks/jit.py [--repeats 3] [--json FILE]

Each sample is a process of its own that has imported torch and attnloom; timed is from the kernel's shape to its loaded
module: rendering, hashing, asking the compiler for its version, building or finding it, loading it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import Row, Target, arguments, publish

COLD, WARM = Target("ours", 10_000, "ms"), Target("ours", 50, "ms")
WARM_LOADS = 5  # per build

# name -> (dtype, head_dim, variant); the last one has hooks in every place that the variants of step 1 use
KERNELS = {
    "fp32 d64 causal": ("float32", 64, "Causal()"),
    "bf16 d128 causal": ("bfloat16", 128, "Causal()"),
    "bf16 d128 causal & soft cap & ALiBi & sinks": ("bfloat16", 128, "Causal() & SoftCap() & ALiBi() & Sinks()"),
    "host module (planner, append, merge)": None,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="cold builds per kernel")
    parser.add_argument("--child", choices=KERNELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(*milliseconds(options.child))
        return
    rows = []
    for name in KERNELS:
        cold: list[tuple[float, float]] = []
        warm: list[tuple[float, float]] = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(sample(name, Path(folder) / "cache"))
                warm += [sample(name, Path(folder) / "cache") for _ in range(WARM_LOADS)]
        for what, samples, target in (("cold build", cold, COLD), ("warm load", warm, WARM)):
            wall, cpu = ([sample[clock] for sample in samples] for clock in (0, 1))
            detail = {
                "min_ms": min(wall),
                "max_ms": max(wall),
                "cpu_ms": round(statistics.median(cpu), 2),
                "samples": len(samples),
            }
            median = round(statistics.median(wall), 2)
            rows.append(Row(f"{what}, {name}", median, "ms", target=target, detail=detail))
    publish("jit", rows, options.json, more={"compiler": compiler()})


def sample(name: str, cache: Path) -> tuple[float, float]:
    """One sample in a fresh process: ms by the clock, ms of CPU time with the compiler's."""
    environ = {**os.environ, "ATTNLOOM_CACHE_DIR": str(cache), "ATTNLOOM_JIT": "on"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", name], env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    wall, cpu = (round(float(word), 2) for word in done.stdout.split())
    return wall, cpu


def milliseconds(name: str) -> tuple[float, float]:
    """In the child: from the shape to the loaded module."""
    import time

    import torch

    from attnloom import variants
    from attnloom.core.host import host_module
    from attnloom.core.kernels import attention_module, attention_spec

    kernel = KERNELS[name]
    begin, cpu_begin = time.perf_counter(), cpu_seconds()
    if kernel is None:
        host_module()
    else:
        dtype, head_dim, variant = kernel
        made = eval(variant, vars(variants))
        attention_module(attention_spec("cpu", getattr(torch, dtype), head_dim, head_dim, made))
    return (time.perf_counter() - begin) * 1e3, (cpu_seconds() - cpu_begin) * 1e3


def cpu_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compiler() -> dict[str, str]:
    """What builds kernels here."""
    from attnloom.core.jit.toolchain import toolchain

    tools = toolchain("cpu")
    return {"identity": tools.identity, "arch": tools.recipe.arch}


if __name__ == "__main__":
    main()
