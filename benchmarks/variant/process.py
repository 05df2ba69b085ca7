"""Children of variants.py: each number of threads, and each build, is a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[1] / "variants.py"


def in_child(
    work: str, cpus: list[int], options: argparse.Namespace, environ: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a process of its own found; it may use ``cpus``, each by one thread of OpenMP."""
    threads = {"OMP_NUM_THREADS": str(len(cpus)), "GOMP_CPU_AFFINITY": ",".join(map(str, cpus))}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        subprocess.run(
            [sys.executable, str(PROGRAM), "--child", work, "--rows", options.rows, *["--quick"] * options.quick],
            env={**os.environ, **threads, **(environ or {}), "ATTNLOOM_BENCHMARK_FILE": file.name},
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            check=True,
        )
        result: dict[str, Any] = json.load(file)
        return result
