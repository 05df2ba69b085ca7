"""The device planner without a GPU: its own text on fibres, in random order, beside the host's; see test_kernels.py."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from attnloom.core.host import host_module
from tests.emulation.build import HERE, compile_text

ROOT = Path(__file__).parents[2]
SECONDS, PATIENCE = 6.0, 120.0


def test_the_emulated_planner_gives_the_hosts_plans(tmp_path: Path) -> None:
    host_module()
    library = compile_text("planner", (HERE / "planner.cpp").read_text(), tmp_path)
    seed = os.environ.get("EMULATION_SEED") or str(random.randrange(10**6))
    command = [sys.executable, "-m", "tests.emulation.planner", str(library), str(SECONDS), seed]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"EMULATION_SEED={seed}, last batch: {last}\n{done.stderr[-3000:]}"
    assert done.stdout.count("seed") > 100, "too few batches in that time"
