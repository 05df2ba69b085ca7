"""Child processes that may hang: their lines with a deadline, and an end for all that they started."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_GRACE_SECONDS = 5.0


def lines_of(descriptor: int, seconds: float) -> Iterator[str]:
    """The lines that come out of a pipe, with their line ends, until it is closed.

    Args:
        descriptor: of the pipe's reading end.
        seconds: how long it may say nothing.

    Raises:
        TimeoutError: it said nothing for that long.
    """
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(seconds):
                raise TimeoutError(f"nothing came for {seconds:g} s")
            data = os.read(descriptor, 1 << 16)
            *lines, pending = (pending + data).split(b"\n")
            yield from (line.decode(errors="replace") + "\n" for line in lines)
            if not data:
                if pending:
                    yield pending.decode(errors="replace")
                return


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started; returns when they are gone. Does nothing if it has ended by itself."""
    if process.poll() is not None:
        return
    below = _descendants(process.pid)
    process.terminate()  # ninja ends its compilers on this; killed, it would leave them running
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and (process.poll() is None or below & _running().keys()):
        time.sleep(0.02)
    # What does not listen: started before the first signal, or by what did not hear it.
    later = _descendants(process.pid) if process.poll() is None else set()
    for pid, _ in later | (below & _running().keys()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


_Identity = tuple[int, str]
"""A process id and when its process began, which tells it from a later one of the same id."""


def _running() -> dict[_Identity, int]:
    """The processes that run, with the process id of their parent."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
            # "pid (name) state parent ...", and the name may hold anything
            status = file.read_text(errors="replace").rpartition(")")[2].split()
            if status[0] != "Z":
                found[int(file.parent.name), status[19]] = int(status[1])
    return found


def _descendants(root: int) -> set[_Identity]:
    running = _running()
    found: set[_Identity] = set()
    parents = {root}
    while new := {identity for identity, parent in running.items() if parent in parents} - found:
        found |= new
        parents = {pid for pid, _ in new}
    return found
