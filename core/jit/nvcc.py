"""Finds CUDA's compiler: where CUDA_HOME says, in PATH, in CUDA's pip packages, in CUDA's usual place."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnloom.core.errors import CompilerNotFound

_USUAL = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Found:
    """A compiler.

    Attributes:
        path: the program.
        where: what led to it, in words.
    """

    path: Path
    where: str


def find_nvcc(environ: Mapping[str, str] | None = None) -> Found:
    """The nvcc that would compile.

    Args:
        environ: variables to read, default ``os.environ``.

    Raises:
        CompilerNotFound: there is none; the message says where it was looked for.
    """
    env = os.environ if environ is None else environ
    for path, where in _candidates(env):
        if path.is_file() and os.access(path, os.X_OK):
            return Found(path, where)
    home = f"CUDA_HOME={env['CUDA_HOME']}" if env.get("CUDA_HOME") else "CUDA_HOME (unset)"
    raise CompilerNotFound(
        f"no nvcc: looked in {home}, in PATH, in CUDA's pip packages (nvidia-cuda-nvcc) and in {_USUAL}. "
        "Install one (pip install nvidia-cuda-nvcc, or NVIDIA's toolkit), or set CUDA_HOME to a toolkit."
    )


def _candidates(env: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    if home := env.get("CUDA_HOME"):
        yield Path(home) / "bin" / "nvcc", "CUDA_HOME"
    if found := shutil.which("nvcc", path=env.get("PATH", os.defpath)):
        yield Path(found), "PATH"
    for root in _packages():
        # nvidia/cu13 from CUDA 13 on, nvidia/cuda_nvcc before
        for path in sorted(root.glob("*/bin/nvcc"), reverse=True):
            yield path, "CUDA's pip packages"
    yield _USUAL / "bin" / "nvcc", "CUDA's usual place"


def _packages() -> list[Path]:
    """The folders of the namespace package ``nvidia``, to which each of CUDA's pip packages adds one."""
    found = importlib.util.find_spec("nvidia")
    return [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
