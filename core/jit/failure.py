"""What is said when a build did not give a library: a refused source, a compiler that hangs, a disk that is full."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from attnloom.core.errors import CacheUnusable, CompileFailed, CompileTimedOut, JitError
from attnloom.core.jit.cache import Cache
from attnloom.core.jit.ninja import HANG_SECONDS, Step

_DIAGNOSTIC = re.compile(
    r"\berror\b|undefined reference|multiple definition|cannot find|not found|No such file|terminated", re.IGNORECASE
)
# May well contain the word "error"; so may the source lines that are shown below a diagnostic.
_REMARK = re.compile(r"\b(warning|note):|^\d* *\|")
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|File size limit exceeded", re.IGNORECASE)
# Bytes. On a full disk the log is cut off too, and may say anything or nothing.
_NO_BYTES, _FEW_BYTES = 1 << 20, 32 << 20


def failure(
    cache: Cache, private: Path, name: str, key: str, steps: Sequence[Step], printed: str, *, hung: bool
) -> JitError:
    """The error of a module whose steps ran in the folder ``private`` and left no library.

    Args:
        cache: keeps the folder of the failed build, for its log.
        private: the working directory of the build.
        name, key: of the module.
        steps: its commands, in order.
        printed: what ninja said.
        hung: the build was ended because no step ended.
    """
    # The one that failed or hangs; or ninja did, before it had begun any.
    unfinished = [step for step in steps if not (private / step.output).exists()]
    step = next((step for step in unfinished if step.begun(private)), unfinished[0])
    log = private / step.log
    text = log.read_text(errors="replace") if log.exists() else ""
    diagnostic = _first(text)
    room = _room(private)
    full = room < _NO_BYTES or (diagnostic is None and room < _FEW_BYTES)
    if _NO_ROOM.search(text) or _NO_ROOM.search(printed) or (full and not hung):
        return CacheUnusable(
            f"building {name} failed: no room to write. {room >> 20} MiB are free at {cache.root}. "
            "Free some, raise the quota or the limit on file sizes (ulimit -f), or set ATTNLOOM_CACHE_DIR to a folder "
            "on another disk; compilers also write to TMPDIR.",
            folder=cache.root,
        )
    if diagnostic is None:
        # It died with a word or without; ninja knows how.
        text += printed
        with cache.writing():
            log.write_text(text)
        diagnostic = next((line.strip() for line in text.splitlines() if line.strip()), "")
    command = shlex.join(step.command)
    kept = cache.keep_failed(log.parent, name, key) / log.name
    if hung:
        return CompileTimedOut(
            f"building {name} was given up: no compiler ended within {HANG_SECONDS / 60:g} minutes.\n"
            f"  command: {command}\n  log, with the source beside it: {kept}\n"
            "  Run the command by hand to see whether the compiler hangs or the machine is short of memory.",
            command=command,
            diagnostic=diagnostic,
            log=kept,
        )
    return CompileFailed(
        f"building {name} failed.\n  first diagnostic: {diagnostic}\n  command: {command}\n"
        f"  log, with the source beside it: {kept}\n"
        "  attnloom needs a C++17 compiler with OpenMP; g++ 12 is tested, CXX names another one.",
        command=command,
        diagnostic=diagnostic,
        log=kept,
    )


def _first(text: str) -> str | None:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if _DIAGNOSTIC.search(line) and not _REMARK.search(line)), None)


def _room(folder: Path) -> int:
    """Bytes that we may still write to the disk of ``folder``."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
