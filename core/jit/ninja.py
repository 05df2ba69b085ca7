"""Writes the build file of several modules, and runs ninja on it once."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attnloom.core.errors import CompilerNotFound
from attnloom.core.jit.cache import LIBRARY
from attnloom.core.jit.process import end_tree, lines_of
from attnloom.core.jit.spec import ModuleSpec
from attnloom.core.jit.toolchain import Toolchain

INCLUDE = "include"
"""Where a module's folder keeps its copies of the headers."""

HANG_SECONDS = 900.0
"""How long no step may end before the compilers are taken to hang: the slowest kernels take a minute or two, and a
machine that swaps is given time."""

_BYTES_PER_JOB = 3 << 29  # 1.5 GiB: what cc1plus may take at -O3 on a template with intrinsics, with room


class Hung(Exception):
    """The compilers hung and were ended; says what ninja had printed."""


@dataclass(frozen=True)
class Step:
    """One command of a build; all paths are relative to the private folder, which is its working directory.

    Attributes:
        command: what is run, without redirections; its last word is the output.
        inputs: files it reads that the build knows.
        output: the file it makes.
        log: the file that gets what it prints.
    """

    command: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    log: str

    def begun(self, folder: Path) -> bool:
        """Whether it was begun in ``folder`` and has made nothing: it failed, or it still runs."""
        return (folder / self.log).exists() and not (folder / self.output).exists()


def steps_of(spec: ModuleSpec, toolchain: Toolchain, folder: str) -> list[Step]:
    """The commands that build one module in ``folder``: one per translation unit, then the link."""
    steps = []
    for source in spec.sources:
        if source.compiled:
            stem = f"{folder}/{source.name.partition('.')[0]}"
            command = toolchain.compile_command(f"{folder}/{source.name}", f"{stem}.o", f"{folder}/{INCLUDE}")
            steps.append(Step(tuple(command), (f"{folder}/{source.name}",), f"{stem}.o", f"{stem}.log"))
    objects = [step.output for step in steps]
    library = f"{folder}/{LIBRARY}"
    link = toolchain.link_command(objects, library)
    return [*steps, Step(tuple(link), tuple(objects), library, f"{folder}/link.log")]


def write_build_file(steps: list[Step], folder: Path) -> None:
    """Write what :func:`run_ninja` runs."""
    (folder / "build.ninja").write_text(_build_file(steps))


def run_ninja(steps: int, folder: Path, on_line: Callable[[], None]) -> tuple[int, str]:
    """Run the build file of ``folder``; steps that do not depend on a failed one are still run.

    Args:
        steps: how many there are.
        folder: the private folder, holding the sources and the build file.
        on_line: called whenever ninja has finished a step or said something.

    Returns:
        ninja's exit status and what it printed.

    Raises:
        CompilerNotFound: there is no ninja.
        Hung: no step ended for :data:`HANG_SECONDS`; all that ran has been ended.
    """
    # Without MAKEFLAGS, so that under `make -j` the limit is ours; LC_ALL for diagnostics that we can read.
    environ = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"} | {"LC_ALL": "C"}
    process = subprocess.Popen(
        [find_ninja(), "-C", str(folder), "-k", "0", "-j", str(min(job_limit(), steps))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        try:
            printed = []
            for line in lines_of(stdout.fileno(), HANG_SECONDS):
                printed.append(line)
                on_line()
            return process.wait(), "".join(printed)
        except TimeoutError:
            printed.append(f"no step ended for {HANG_SECONDS:g} s\n")
            raise Hung("".join(printed)) from None
        finally:
            end_tree(process)


def find_ninja() -> str:
    """The ninja of the pip package, or the one in PATH.

    Raises:
        CompilerNotFound: neither is there.
    """
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        program = Path(ninja.BIN_DIR) / "ninja"
        if program.is_file():
            return str(program)
    if (found := shutil.which("ninja")) is not None:
        return found
    raise CompilerNotFound("no ninja: looked for the Python package and in PATH. Install it: pip install ninja")


def job_limit() -> int:
    """How many compilers may run at once: as many as the cores we may use and the free memory allow, at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), _available_bytes() // _BYTES_PER_JOB))


def _available_bytes() -> int:
    """Free memory of the machine, or of the container where that is less."""
    available = [1 << 62]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available.append(int(line.split()[1]) << 10)
    except OSError:
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            available.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(available)


def _build_file(steps: list[Step]) -> str:
    # No depfiles and no header dependencies: every build starts from an empty folder.
    lines = ["rule run", "  command = ( $run ) > $log 2>&1", "  description = $out", ""]
    for step in steps:
        # An output appears under its name when it is whole: a compiler that is killed leaves half of one, and a library
        # is published while other steps still run.
        run = f"{shlex.join([*step.command[:-1], step.output + '.part'])} && mv {step.output}.part {step.output}"
        escaped = run.replace("$", "$$")
        lines += [f"build {step.output}: run {' '.join(step.inputs)}", f"  run = {escaped}", f"  log = {step.log}", ""]
    return "\n".join(lines)
