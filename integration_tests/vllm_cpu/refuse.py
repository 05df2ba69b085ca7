"""Ask vLLM, with attnloom, for what attnloom does not serve; report what it said.

    python -m integration_tests.vllm_cpu.refuse TASKS.json RESULTS.json

A task: `engine` (arguments of vllm.LLM), `environment` (variables), `backend` (default CUSTOM). A result: the messages
of the error and of its causes, or null if the engine came up.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def messages(error: BaseException | None) -> str:
    """The messages of an error and of everything that caused it."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


def start(task: dict[str, Any]) -> str | None:
    """Start an engine as the task says; what was wrong with it, or None."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ.update(task.get("environment", {}))
    try:
        LLM(
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            attention_config={"backend": task.get("backend", "CUSTOM")},
            **task["engine"],
        )
    except Exception as error:
        return messages(error)
    finally:
        cleanup_dist_env_and_memory()
        for name in task.get("environment", {}):
            del os.environ[name]
    return None


def main() -> None:
    """Run the tasks named on the command line."""
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps([start(task) for task in json.loads(source.read_text())]))


if __name__ == "__main__":
    main()
