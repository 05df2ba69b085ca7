"""Layers and steps that the tiny models do not have agree with float64, or are refused in words."""

from __future__ import annotations

from pathlib import Path

from integration_tests.running import run_program
from integration_tests.sglang_cpu import layers
from integration_tests.sglang_cpu.running import environment


def test_layers(tmp_path: Path) -> None:
    results = run_program("integration_tests.sglang_cpu.layers", [], tmp_path, environment())
    assert {result["case"] for result in results} == {name for name in vars(layers) if name.startswith("check_")}
    for result in results:
        assert result["outcome"] == "passed", f"{result['case']}: {result['outcome']}"
        assert result["runs"] > 0, result["case"]
