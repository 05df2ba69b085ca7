"""What vLLM answers on a GPU with attnloom is what the model answers in float32, as near as 16 bits allow.

vLLM's own backends answer the same prompts. How far they are from the judge, and from each other, is said beside what
is wrong with ours; all cases are run and judged before a test fails.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests.judged import judged
from integration_tests.models import smollm2
from integration_tests.running import ROOT, run_program
from integration_tests.vllm_gpu import real
from integration_tests.vllm_gpu.cases import CASES, RUNNERS
from integration_tests.vllm_gpu.summary import summary

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

PROCESSES = 3
"""At a time: an engine needs little of a GPU, and takes most of its time to start."""
GRAPHS = 4
"""Batch sizes that are captured, at least."""


def environment(runner: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # The engine in the program's own process, where its counters can be read.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": runner,
    }


def who_ran(case: dict[str, Any], found: dict[str, Any], runner: str) -> list[str]:
    """Every layer is attnloom's; its kernel ran in every eager step, or was captured for each of several batch sizes.

    Returns what is not so.
    """
    layers, steps = found["layers"], case["max_tokens"]
    drafts = case["engine"].get("speculative_config")
    if drafts:
        steps //= 1 + drafts["num_speculative_tokens"]  # if all are right
    started, served = found["runs_at_start"], found["runs"] - found["runs_at_start"]
    checks = {
        f"its model runner is {found['runner']}": found["runner"] == RUNNERS[runner],
        f"its layers are {found['impls']}": found["impls"] == ["AttnloomImpl"],
        # A draft model runs some of the layers.
        f"{started} and {served} kernels of {layers} layers: whole steps": drafts is not None
        or started % layers == served % layers == 0,
    }
    if "enforce_eager" in case["engine"]:
        checks[f"{served} kernels of {layers} layers: {steps} steps or more"] = served >= steps * layers
    else:
        checks[f"{started} kernels before it serves: {GRAPHS} graphs or more"] = started >= GRAPHS * layers
        # The older runner has no graphs for draft models.
        checks[f"{served} kernels of {layers} layers: fewer than {steps} steps, since graphs serve"] = (
            served < steps * layers or (drafts is not None and "model" in drafts)
        )
    return [f"{case['name']}: CUSTOM should be otherwise: {said}" for said, holds in checks.items() if not holds]


def check(cases: list[dict[str, Any]], runner: str, folder: Path) -> list[dict[str, Any]]:
    """Run and judge cases, and fail with all that is wrong with any of them. Returns the results."""
    results = run_cases(cases, runner, folder)
    wrong, lines = [], []
    for case, result in zip(cases, results, strict=True):
        found = {backend: result[backend] for backend in case["backends"]}
        failed = {backend: each["error"] for backend, each in found.items() if "error" in each}
        wrong += [f"{case['name']}: {backend} failed: {error}" for backend, error in failed.items()]
        lines.append(summary(result))
        if "CUSTOM" in failed:
            continue
        wrong += who_ran(case, found["CUSTOM"], runner)
        answers = {backend: each["answers"] for backend, each in found.items() if backend not in failed}
        complaints, told = judged(case, answers)
        wrong += complaints
        lines.append(told)
    report = "\n".join(lines)
    print(report)
    assert not wrong, "\n".join(["", *wrong, "", report])
    return results


def processes(case: dict[str, Any]) -> list[dict[str, Any]]:
    """A case, or parts of it that need a process each. Eager engines share one, since to start it takes a while.

    A process captures the graphs of one engine: torch's allocator fails an assertion of its own when vLLM 0.26 makes a
    second one in the pool that the graphs of the first have left (use_count > 0, on an H200).
    """
    if "enforce_eager" in case["engine"]:
        return [case]
    return [{**case, "backends": [backend]} for backend in case["backends"]]


def run_cases(cases: list[dict[str, Any]], runner: str, folder: Path) -> list[dict[str, Any]]:
    """Their results, in their order."""
    parts = [part for case in cases for part in processes(case)]
    results: dict[str, dict[str, Any]] = {case["name"]: {} for case in cases}
    with ThreadPoolExecutor(PROCESSES) as pool:
        folders = [folder / str(nth) for nth in range(len(parts))]
        for found in pool.map(run_process, parts, [runner] * len(parts), folders):
            results[found["name"]] |= found
    return list(results.values())


def run_process(case: dict[str, Any], runner: str, folder: Path) -> dict[str, Any]:
    """The result of a case in a process of its own, which may fail."""
    folder.mkdir()
    try:
        module = "integration_tests.vllm_gpu.case"
        (found,) = run_program(module, [case], folder, environment(runner), timeout=560)
    except AssertionError as error:
        return {"name": case["name"], **{backend: {"error": str(error)} for backend in case["backends"]}}
    result: dict[str, Any] = found
    return result


@pytest.mark.parametrize("runner", RUNNERS)
def test_answers(runner: str, tmp_path: Path) -> None:
    check([case for case in CASES.values() if runner in case["runners"]], runner, tmp_path)


def test_real_weights(tmp_path: Path) -> None:
    """SmolLM2 in decode graphs says what it says in float32, and it makes sense."""
    try:
        smollm2.gguf_file()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    (result,) = check([real.case()], "1", tmp_path)
    said = real.tokenizer().decode(result["CUSTOM"]["answers"][0]["tokens"])
    assert "Paris" in said, said
