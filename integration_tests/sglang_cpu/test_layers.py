"""Layers, steps and graphs that the tiny models do not have agree with float64, or are refused in words."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from integration_tests.running import run_program
from integration_tests.sglang_cpu.running import environment


@pytest.mark.parametrize("program", ["layers", "refusals", "graphs"])
def test_every_check_of_a_program(program: str, tmp_path: Path) -> None:
    name = f"integration_tests.sglang_cpu.{program}"
    results = run_program(name, [], tmp_path, environment())
    checks = {check for check in vars(importlib.import_module(name)) if check.startswith("check_")}
    assert {result["case"] for result in results} == checks and checks
    for result in results:
        assert result["outcome"] == "passed", f"{result['case']}: {result['outcome']}"
        assert result["runs"] > 0, result["case"]
