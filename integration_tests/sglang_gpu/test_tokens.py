"""What SGLang answers on a GPU with attnloom is what the model answers in float32, as near as 16 bits allow.

SGLang's own triton backend answers the same prompts. How far it is from the judge, and from ours, is said beside what
is wrong with ours. A probe in the scheduler counts which attention ran.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests.judged import judged
from integration_tests.running import run_program
from integration_tests.sglang_gpu.case import line, run_case
from integration_tests.sglang_gpu.cases import CASES
from integration_tests.sglang_gpu.running import environment

pytest.importorskip("sglang")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)


def who_ran(case: dict[str, Any], backend: str, found: dict[str, Any]) -> list[str]:
    """The backend that was chosen and no other, in steps of the kinds that the case is about.

    With graphs, kernels were launched when they were captured. Returns what is not so.
    """
    counts, engine = found["after"], case["engine"]
    ours, other = (counts["attnloom"], counts.get("triton", 0))[:: 1 if backend == "attnloom" else -1]
    first, second, third = found["cached_tokens"]
    checks = {"it ran": ours > 0, "no other backend ran": other == 0}
    checks |= {"the second round was cached": second > first, "the third was not": third < second}
    if backend == "attnloom" and not engine.get("disable_cuda_graph"):
        checks["kernels were captured"] = found["before"]["attnloom"] > 0
    if engine.get("enable_mixed_chunk"):
        checks["chunks were mixed with requests that decode"] = counts.get("MIXED steps", 0) > 0
    if engine.get("speculative_algorithm"):
        checks["drafts were verified"] = counts.get("TARGET_VERIFY steps", 0) > 0
    else:
        checks["it decoded"] = counts.get("DECODE steps", 0) > 0
    cached = found["cached_tokens"]
    return [f"{backend}: not so: {said}; {counts}, cached {cached}" for said, holds in checks.items() if not holds]


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str) -> None:
    case = CASES[name]
    graphs = not case["engine"].get("disable_cuda_graph")
    if case["engine"].get("speculative_algorithm") and graphs and find_spec("deep_gemm") is None:
        pytest.skip("SGLang imports deep_gemm where it captures a draft model's graphs: install sgl-deep-gemm")
    with ThreadPoolExecutor() as pool:  # an engine needs little of a GPU, and takes most of its time to start
        found = pool.map(run_case, [case] * len(case["backends"]), case["backends"])
        results = dict(zip(case["backends"], found, strict=True))
    for backend in results:
        print(line(case, backend, results))
    failed = {backend: found["error"] for backend, found in results.items() if "error" in found}
    wrong = [f"{backend} failed: {error}" for backend, error in failed.items()]
    told = ""
    if "attnloom" not in failed:
        for backend in results.keys() - failed.keys():
            wrong += who_ran(case, backend, results[backend])
        answers = {backend: found["answers"] for backend, found in results.items() if backend not in failed}
        complaints, told = judged(case, answers)
        wrong += complaints
    print(told)
    assert not wrong, "\n".join(["", *wrong, told])


@pytest.mark.parametrize("module", ["kit", "graphs"])
def test_programs_of_the_cpu_on_a_gpu(module: str, tmp_path: Path) -> None:
    """SGLang's conformance kit, its graph runners included; and batches in captured graphs, against float64."""
    results = run_program(
        f"integration_tests.sglang_cpu.{module}", ["cuda"], tmp_path, environment(tmp_path), timeout=580
    )
    bad = {result["case"]: result["outcome"] for result in results if result["outcome"] != "passed"}
    assert results and not bad, "\n".join(f"{case}: {outcome}" for case, outcome in bad.items())
    assert all(result["runs"] > 0 for result in results)
