"""Models on a GPU: the same prompts through attnloom and SGLang's own triton backend, each in a process of its own.

    python -m integration_tests.sglang_gpu.cases [NAME ...] > CASES.json
    python -m integration_tests.sglang_gpu.case CASES.json RESULTS.json

A case: `name`, `model` (a name of models/tiny.py, or a folder), `prompts` (lists of token ids), `max_tokens`, `engine`
(arguments of sglang.Engine), `backends`, `logprobs`, `limit_s` (seconds that an engine may take, its start included),
`timed` (lengths of prompts, decode steps, vocabulary). A result: the case's name, and for each backend what engine.py
says, or `error`. Results are written after each engine, and a line for each is printed. attnloom need not be installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from integration_tests.compare import agreement
from integration_tests.running import run_program
from integration_tests.sglang_gpu.running import environment


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The part of all answers before they part."""
    kept = whole = 0
    for mine, other in zip(ours, theirs, strict=True):
        pairs = list(zip(mine["tokens"], other["tokens"], strict=True))
        whole += len(pairs)
        kept += next((step for step, (token, wanted) in enumerate(pairs) if token != wanted), len(pairs))
    return kept / whole


def line(case: dict[str, Any], backend: str, result: dict[str, Any]) -> str:
    """What is printed of an engine; results of attnloom come first."""
    found = result[backend]
    if "error" in found:
        return f"{case['name']:16} {backend:9} FAILED: {found['error'][-2000:]}"
    before, after = found["before"], found["after"]
    steps = ", ".join(f"{value} {name}" for name, value in after.items() if name.endswith("steps") and name != "steps")
    text = f"{case['name']:16} {backend:9} start {found['start_s']:.0f} s, serve {found['served_s']:.0f} s, {steps}; "
    text += f"kernels launched: attnloom {before['attnloom']} -> {after['attnloom']}, triton {after.get('triton', 0)}"
    if "decode_step_ms" in found:
        text += f"; prefill {found['prefill_tokens_per_s']:,.0f} tokens/s, decode {found['decode_step_ms']:.2f} ms"
    ours = result.get("attnloom", {}).get("answers")
    if backend != "attnloom" and ours:
        text += f"; same {same(ours, found['answers']):.3f}"
        if case.get("logprobs", True):
            text += f", {agreement(ours, found['answers'])}"
    return text


def run_case(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """One engine, in a process that is stopped when it takes too long."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            task = [case, backend]
            module = "integration_tests.sglang_gpu.engine"
            (found,) = run_program(module, task, folder, environment(folder), timeout=case["limit_s"])
        except AssertionError as error:
            return {"error": str(error)}
    result: dict[str, Any] = found
    return result


def main() -> None:
    """Run the cases named on the command line."""
    source, target = map(Path, sys.argv[1:])
    results: list[dict[str, Any]] = []
    for case in json.loads(source.read_text()):
        result: dict[str, Any] = {"name": case["name"]}
        results.append(result)
        for backend in case["backends"]:
            result[backend] = run_case(case, backend)
            print(line(case, backend, result), flush=True)
            target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
