"""Every example runs, checks itself against torch and says so; the variant that a user writes is short."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SAID = {
    "relative_bias.py": "relative bias: 100 queries on 100 keys in 7 pages, as torch computes it",
    "document_mask.py": "as torch computes it",
    "sigmoid.py": "two biases, one kernel, as torch computes it",
    "rotary.py": "keys cached unrotated, as torch computes it",
    "serve.py": "serve.toml: causal_sigmoid, 3 requests in one step, as torch computes it",
}


def test_every_example_is_known() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_an_example_checks_itself(name: str, tmp_path: Path) -> None:
    """From another folder, as a user runs it; torch.testing inside ends it where a number is wrong."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SAID[name] in done.stdout


@pytest.mark.parametrize("name", sorted(set(SAID) - {"serve.py"}))
def test_a_variant_takes_ten_lines(name: str) -> None:
    written = (EXAMPLES / name).read_text().partition("# The variant.\n")[2].partition("# Its end.\n")
    assert written[1]
    assert 1 <= sum(bool(line.strip()) for line in written[0].splitlines()) <= 10


def test_a_serving_file_takes_ten_lines() -> None:
    text = (EXAMPLES / "serve.toml").read_text()
    assert tomllib.loads(text)["variant"][0]["use"] == "sigmoid.py:sigmoid"
    assert len(text.splitlines()) <= 10
