"""Starts the programs of this folder, each in a process of its own, with vLLM set up for a small machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "models"


def environment(**extra: str) -> dict[str, str]:
    """The environment of a vLLM process in these tests."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The engine in the test's own process: half the start-up time, and errors arrive as they were raised.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Waiting threads sleep. Spinning ones take the core from the thread they wait for when it is shared.
        "OMP_WAIT_POLICY": "passive",
        **extra,
    }


def run_program(module: str, task: list[Any], folder: Path, timeout: float = 600, **extra: str) -> list[Any]:
    """Run `python -m module TASK.json RESULT.json` and return the result.

    Raises AssertionError with the end of its output when it fails.
    """
    source, target, log = folder / "task.json", folder / "result.json", folder / "log.txt"
    source.write_text(json.dumps(task))
    with log.open("w") as stream:
        status = subprocess.run(
            [sys.executable, "-m", module, str(source), str(target)],
            cwd=folder,
            env=environment(**extra),
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        ).returncode
    assert status == 0, f"{module} exited with {status}:\n{log.read_text()[-6000:]}"
    result: list[Any] = json.loads(target.read_text())
    return result
