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
from attnloom.core.jit.spec import ModuleSpec
from attnloom.core.jit.toolchain import Toolchain

INCLUDE = "include"
"""Where a module's folder keeps its copies of the headers."""

_BYTES_PER_JOB = 3 << 29  # 1.5 GiB: what cc1plus may take at -O3 on a template with intrinsics, with room


@dataclass(frozen=True)
class Step:
    """One command of a build; all paths are relative to the private folder, which is its working directory.

    Attributes:
        command: what is run, without redirections.
        inputs: files it reads that the build knows.
        output: the file it makes.
        log: the file that gets what it prints.
    """

    command: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    log: str


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


def run_ninja(steps: list[Step], folder: Path, on_line: Callable[[], None]) -> tuple[int, str]:
    """Run the steps in ``folder``; ones that do not depend on a failed one are still run.

    Args:
        steps: what to run.
        folder: the private folder, holding the sources.
        on_line: called whenever ninja has finished a step or said something.

    Returns:
        ninja's exit status and what it printed.

    Raises:
        CompilerNotFound: there is no ninja.
    """
    (folder / "build.ninja").write_text(_build_file(steps))
    jobs = min(job_limit(), len(steps))
    # Without MAKEFLAGS, so that under `make -j` the limit is ours; LC_ALL for diagnostics that we can read.
    environ = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"} | {"LC_ALL": "C"}
    process = subprocess.Popen(
        [find_ninja(), "-C", str(folder), "-k", "0", "-j", str(jobs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ,
    )
    printed = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            printed.append(line)
            on_line()
        return process.wait(), "".join(printed)
    finally:
        if process.poll() is None:
            process.terminate()  # ninja ends its compilers on this; killed, it would leave them running
            process.wait()
        process.stdout.close()


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
        run = shlex.join(step.command)
        if step.output.endswith(LIBRARY):
            # A library appears under its name when it is whole: it is published while other steps still run.
            run = f"{shlex.join([*step.command[:-1], step.output + '.part'])} && mv {step.output}.part {step.output}"
        escaped = run.replace("$", "$$")
        lines += [f"build {step.output}: run {' '.join(step.inputs)}", f"  run = {escaped}", f"  log = {step.log}", ""]
    return "\n".join(lines)
