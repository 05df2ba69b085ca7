"""The tree passes its own tools. They come with the dev extra; one that is missing is a failure, not a skip."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(tool: str, *arguments: str) -> None:
    """Run a tool of this environment on the tree; it must find nothing."""
    program = shutil.which(tool, path=str(Path(sys.executable).parent)) or shutil.which(tool)
    assert program is not None, f"{tool} is missing: pip install -e '.[dev]'"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


def test_ruff_check() -> None:
    run("ruff", "check")


def test_ruff_format() -> None:
    run("ruff", "format", "--check")


def test_mypy_strict() -> None:
    run("mypy")


def test_clang_format() -> None:
    folders, ends = ("csrc", "tests", "benchmarks"), ("h", "hpp", "cpp", "cu")
    files = sorted(
        str(path.relative_to(ROOT)) for folder in folders for end in ends for path in ROOT.glob(f"{folder}/**/*.{end}")
    )
    assert all(any(file.startswith(folder) for file in files) for folder in folders)
    run("clang-format", "--dry-run", "-Werror", *files)


def test_pre_commit_configuration() -> None:
    run("pre-commit", "validate-config", ".pre-commit-config.yaml")
