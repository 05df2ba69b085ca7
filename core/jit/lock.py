"""File locks that die with their process, on files that are gone when nobody holds them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class Lock:
    """An exclusive lock on a file, held from :func:`acquire` until :meth:`release`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Remove the file, then let go: who waited for it finds out and makes a new one."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def acquire(path: Path, *, wait: bool = True) -> Lock | None:
    """Lock the file at ``path``, making it if need be.

    Args:
        path: the lock file; its folder exists.
        wait: wait for another holder; otherwise give None when there is one.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    while True:
        # Not inherited by children (PEP 446): a compiler that outlives a killed builder does not keep its lock.
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        # The holder before us may have removed the file while we waited; then this lock guards nothing.
        if _is_at(descriptor, path):
            return Lock(path, descriptor)
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
