"""Starts the programs of this folder, each in a process of its own, with vLLM set up for a small machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from integration_tests import running
from integration_tests.running import ROOT


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
    """Run a program of this folder with more environment variables: see integration_tests.running."""
    return running.run_program(module, task, folder, environment(**extra), timeout)
