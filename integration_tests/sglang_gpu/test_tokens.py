"""What SGLang answers on a GPU with attnloom is what it answers with its own triton backend.

Tokens of two right backends part where the two likeliest are level, so logprobs are compared as long as both have seen
the same tokens. A probe in the scheduler counts which attention ran.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests.compare import agreement
from integration_tests.running import run_program
from integration_tests.sglang_gpu.case import run_case, same
from integration_tests.sglang_gpu.cases import CASES
from integration_tests.sglang_gpu.running import environment

pytest.importorskip("sglang")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

BOUND = 0.05
EIGHT_BITS = 0.3
"""triton rounds queries to eight bits as well, attnloom keeps them."""
SAME = 0.8
"""Drafts come without logprobs: the part of the answers that is the same has to do, and ties part."""


def check_who_ran(case: dict[str, Any], backend: str, found: dict[str, Any]) -> None:
    """The backend that was chosen and no other; with graphs, kernels were launched when they were captured."""
    counts = found["after"]
    ours, other = (counts["attnloom"], counts.get("triton", 0))[:: 1 if backend == "attnloom" else -1]
    assert ours > 0 and other == 0, counts
    if backend == "attnloom" and not case["engine"].get("disable_cuda_graph"):
        assert found["before"]["attnloom"] > 0
        assert counts["DECODE steps"] + counts.get("TARGET_VERIFY steps", 0) > 0


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str) -> None:
    case = CASES[name]
    results = {backend: run_case(case, backend) for backend in case["backends"]}
    for backend, found in results.items():
        assert "error" not in found, f"{backend}: {found['error']}"
        check_who_ran(case, backend, found)
        assert found["cached_tokens"][1] > found["cached_tokens"][0]
    ours, theirs = (found["answers"] for found in results.values())
    if not case["logprobs"]:
        assert same(ours, theirs) >= SAME
        return
    bound = EIGHT_BITS if "kv_cache_dtype" in case["engine"] else BOUND
    seen = agreement(ours, theirs)
    assert seen.steps >= len(ours)
    assert seen.apart <= bound, (name, seen)
    assert seen.gap <= 2 * bound, (name, seen)


@pytest.mark.parametrize("module", ["kit", "graphs"])
def test_programs_of_the_cpu_on_a_gpu(module: str, tmp_path: Path) -> None:
    """SGLang's conformance kit, its graph runners included; and batches in captured graphs, against float64."""
    results = run_program(
        f"integration_tests.sglang_cpu.{module}", ["cuda"], tmp_path, environment(tmp_path), timeout=580
    )
    bad = {result["case"]: result["outcome"] for result in results if result["outcome"] != "passed"}
    assert results and not bad, json.dumps(bad, indent=1)
    assert all(result["runs"] > 0 for result in results)
