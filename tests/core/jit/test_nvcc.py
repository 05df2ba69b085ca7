"""Where CUDA's compiler is looked for, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnloom.core.errors import CompilerNotFound
from attnloom.core.jit import nvcc
from attnloom.core.jit.nvcc import Found, find_nvcc


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with no CUDA in its usual place."""
    monkeypatch.setattr(nvcc, "_USUAL", tmp_path / "usual")


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "bin")}
    with pytest.raises(CompilerNotFound, match=rf"CUDA_HOME={tmp_path}/home, in PATH, .*pip install nvidia-cuda-nvcc"):
        find_nvcc(env)
    usual = program(tmp_path / "usual" / "bin" / "nvcc")
    assert find_nvcc(env) == Found(usual, "CUDA's usual place")
    packages = tmp_path / "site" / "nvidia"
    older = program(packages / "cu12" / "bin" / "nvcc")
    monkeypatch.syspath_prepend(str(packages.parent))
    assert find_nvcc(env) == Found(older, "CUDA's pip packages")
    newer = program(packages / "cu13" / "bin" / "nvcc")
    assert find_nvcc(env) == Found(newer, "CUDA's pip packages")
    in_path = program(tmp_path / "bin" / "nvcc")
    assert find_nvcc(env) == Found(in_path, "PATH")
    home = program(tmp_path / "home" / "bin" / "nvcc")
    assert find_nvcc(env) == Found(home, "CUDA_HOME")
    home.chmod(0o644)
    assert find_nvcc(env).where == "PATH"


def test_an_unset_home_is_said_to_be_unset(tmp_path: Path) -> None:
    with pytest.raises(CompilerNotFound, match=r"looked in CUDA_HOME \(unset\)"):
        find_nvcc({"PATH": str(tmp_path)})
