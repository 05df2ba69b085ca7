"""Small modules to build, compilers that keep a count, and fresh processes that build with them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from attnloom.core.jit import ModuleSpec, Source

ROOT = Path(__file__).parents[3]

CHILD_PRELUDE = """
import json, os, sys, time
from attnloom.core.errors import *
from attnloom.core.jit import ModuleSpec, Source, build, load
def spec(name="probe", value=42):
    text = '#define API extern "C" __attribute__((visibility("default")))\\n'
    return ModuleSpec(name, (Source("probe.cpp", f"{text}API int answer() {{ return {value}; }}\\n"),))
"""


def spec(name: str = "probe", value: int = 42) -> ModuleSpec:
    """A module whose function ``answer`` returns ``value``; CHILD_PRELUDE defines the very same."""
    text = '#define API extern "C" __attribute__((visibility("default")))\n'
    return ModuleSpec(name, (Source("probe.cpp", f"{text}API int answer() {{ return {value}; }}\n"),))


def including(name: str, include: str) -> ModuleSpec:
    """A module whose one line includes a file."""
    return ModuleSpec(name, (Source("probe.cpp", f"#include {include}\n"),))


class CountingCompiler:
    """A C++ compiler in its own folder that writes a line for each source it compiles, then does what it is told.

    Its version is the real compiler's, so it makes modules with the keys of the real one.
    """

    def __init__(self, folder: Path, before: str = "") -> None:
        real = self.find()
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "compiled.txt"
        self.log.touch()
        self.path = folder / "counting-c++"
        self.path.write_text(
            f'#!/bin/sh\ncase " $* " in *" -c "*) echo "$*" >> {self.log}\n{before}\n;; esac\nexec {real} "$@"\n'
        )
        self.path.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)

    @staticmethod
    def find() -> str:
        """The real compiler."""
        real = shutil.which("g++") or shutil.which("c++")
        assert real is not None, "these tests compile C++: install g++"
        return real

    @property
    def count(self) -> int:
        """Sources compiled so far."""
        return len(self.log.read_text().splitlines())


def environment(cache: Path, *, root: Path = ROOT, **variables: str) -> dict[str, str]:
    """The environment of a fresh process that has its own cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ATTNLOOM_")}
    return inherited | {"PYTHONPATH": str(root), "ATTNLOOM_CACHE_DIR": str(cache), **variables}


def start(code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a fresh process that runs ``code`` after CHILD_PRELUDE."""
    command = [sys.executable, "-c", CHILD_PRELUDE + code]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process of :func:`start`; it must succeed. Gives what it printed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def run(code: str, env: dict[str, str]) -> str:
    """Run ``code`` in a fresh process; it must succeed. Gives what it printed."""
    return finish(start(code, env))
