"""Starts programs of the tests, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "build" / "models"


def run_program(
    module: str, task: list[Any], folder: Path, environment: dict[str, str], timeout: float = 600
) -> list[Any]:
    """Run `python -m module TASK.json RESULT.json` in `folder`, by these names, and return the result.

    Raises AssertionError with the end of its output when it fails, and when it takes longer than `timeout` seconds; it
    and every process that it started have been stopped then.
    """
    source, target, log = folder / "task.json", folder / "result.json", folder / "log.txt"
    source.write_text(json.dumps(task))
    target.unlink(missing_ok=True)
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(source), str(target)],
            cwd=folder,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise AssertionError(f"{module} took longer than {timeout} s:\n{log.read_text()[-6000:]}") from None
            raise
    assert status == 0, f"{module} exited with {status}:\n{log.read_text()[-6000:]}"
    result: list[Any] = json.loads(target.read_text())
    return result
