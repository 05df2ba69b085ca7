"""Programs of checks: the functions of a module whose names begin with `check_`, run one after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration_tests.sglang_cpu.kit import run


def device() -> str:
    """Where the program named on the command line runs: its task is `[]` for a CPU, or `["cuda"]`."""
    (found,) = json.loads(Path(sys.argv[1]).read_text()) or ["cpu"]
    return str(found)


def run_checks(module: Mapping[str, Any]) -> None:
    """Run every check of a module, and write how each ended as the conformance kit does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    checks = [(name, function) for name, function in module.items() if name.startswith("check_")]
    results = [run(name, function, True) for name, function in checks]
    Path(sys.argv[2]).write_text(json.dumps(results))


def refused(words: str, function: Any) -> None:
    try:
        function()
    except (NotImplementedError, RuntimeError) as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was refused with {words!r}")
