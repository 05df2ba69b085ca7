"""The environment of SGLang's processes in these tests: its CPU engine, and what a machine without a GPU needs."""

from __future__ import annotations

import os
from pathlib import Path

from integration_tests.running import ROOT

HERE = Path(__file__).resolve().parent


def environment(**extra: str) -> dict[str, str]:
    """For a process that imports SGLang. workarounds/sitecustomize.py says what the workarounds are."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "workarounds", HERE / "plugins", ROOT))),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang's Triton kernels run in Triton's interpreter.
        "TRITON_INTERPRET": "1",
        # Waiting threads sleep. Spinning ones take the core from the thread they wait for when it is shared.
        "OMP_WAIT_POLICY": "passive",
        **extra,
    }
