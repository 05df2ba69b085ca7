"""The compilers and where they were found. Without one, attnloom runs what its cache holds."""

from __future__ import annotations

import os
import subprocess

from attnloom.core.cli.checks.section import Section
from attnloom.core.errors import CompilerNotFound
from attnloom.core.jit.ninja import find_ninja, job_limit
from attnloom.core.jit.nvcc import find_nvcc
from attnloom.core.jit.toolchain import toolchain

_ELSEWHERE = "or fill the cache elsewhere: attnloom build --bundle FILE there, attnloom cache unpack FILE here"


def check() -> Section:
    """Host C++, nvcc, ninja."""
    import torch

    section = Section("compilers")
    try:
        found = toolchain("cpu")
        where = "CXX" if os.environ.get("CXX") else "PATH"
        section.facts["C++"] = f"{' '.join(found.command)}, from {where}; {found.identity}"
    except CompilerNotFound as error:
        section.facts["C++"] = None
        section.warning(f"no C++ compiler: {error}", f"apt-get install g++, or the like, {_ELSEWHERE}")
    try:
        nvcc = find_nvcc()
        section.facts["nvcc"] = f"{nvcc.path}, from {nvcc.where}; {_release(str(nvcc.path))}"
    except CompilerNotFound as error:
        section.facts["nvcc"] = None
        if torch.cuda.is_available():
            section.warning(str(error), f"pip install nvidia-cuda-nvcc, {_ELSEWHERE}")
    try:
        section.facts["ninja"] = find_ninja()
    except CompilerNotFound as error:
        section.facts["ninja"] = None
        section.warning(str(error), "pip install ninja")
    section.facts["compilers at once"] = job_limit()
    return section


def _release(nvcc: str) -> str:
    """The line of `nvcc --version` that says which it is."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    lines = [line.strip() for line in done.stdout.splitlines() if "release" in line]
    return lines[-1] if lines else "of an unknown release"
