"""The cache: where it is, whom it belongs to, what is in it."""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path

from attnloom.core.cli.checks.section import Section
from attnloom.core.cli.text import count, size
from attnloom.core.errors import CacheUnusable
from attnloom.core.jit.cache import Cache
from attnloom.core.jit.inventory import entries
from attnloom.core.settings import settings

_NOEXEC = os.ST_NOEXEC
_LITTLE = 32 << 20
"""Bytes: what a build of a few modules takes on the disk, with its sources and objects."""


def check() -> Section:
    """Folder, permissions, room, modules."""
    section = Section("cache")
    try:
        now = settings()
    except ValueError:
        return section  # the settings' own section says what is wrong
    root = now.cache_dir
    section.facts["folder"] = str(root)
    above = _existing(root)
    if not above.is_dir():
        section.facts["writable"] = False
        section.broken(
            f"{above} is no folder: nothing can be kept at {root}",
            "set ATTNLOOM_CACHE_DIR to a folder",
        )
        return section
    _check_folder(section, root, above, needed=now.jit)
    disk = os.statvfs(above)
    free = disk.f_bavail * disk.f_frsize
    section.facts["free on its disk"] = size(free)
    if free < _LITTLE and now.jit:
        section.warning(
            f"{size(free)} are free on the disk of {root}: no room for what is not in the cache yet",
            "free some, raise the quota, or set ATTNLOOM_CACHE_DIR to a folder on another disk",
        )
    if disk.f_flag & _NOEXEC:
        section.broken(
            f"the disk of {root} is mounted noexec: no module can be loaded from it",
            "set ATTNLOOM_CACHE_DIR to a folder on another disk",
        )
    try:
        found = entries(Cache(root))
    except CacheUnusable as error:
        section.broken(str(error), _remedy(root))
        return section
    states = Counter(entry.state for entry in found)
    section.facts["modules"] = f"{count(len(found), 'module')}, {size(sum(entry.size for entry in found))}" + (
        f" ({', '.join(f'{number} {state}' for state, number in sorted(states.items()))})" if found else ""
    )
    for entry in found:
        if entry.state == "refused":
            section.broken(entry.reason, _remedy(entry.folder))
        elif entry.state == "damaged":
            section.warning(entry.reason, "attnloom cache prune --stale")
    return section


def _check_folder(section: Section, root: Path, above: Path, *, needed: bool) -> None:
    if root.exists():
        status = root.stat()
        section.facts["permissions"] = f"{stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}"
    else:
        section.facts["permissions"] = "is made when it is first needed"
    # root may write anywhere, but not on a disk that is mounted read-only
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    section.facts["writable"] = writable
    if not writable and needed:
        section.warning(
            f"user {os.geteuid()} cannot write {above}: what is not in the cache cannot be built",
            f"chown {os.geteuid()} {above}, or set ATTNLOOM_CACHE_DIR to a folder of your own, or set ATTNLOOM_JIT=off",
        )


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def _remedy(path: Path) -> str:
    return f"chmod -R go-w {path} if you trust what is in it, or set ATTNLOOM_CACHE_DIR to a folder of your own"
