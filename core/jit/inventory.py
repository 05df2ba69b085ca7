"""What lies in a cache: how big, how old, by which sources; and its removal."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from attnloom.core.errors import CacheUnusable, JitError
from attnloom.core.jit.cache import LIBRARY, RECORD, Cache, checked_library, read_record
from attnloom.core.jit.key import fingerprint
from attnloom.core.jit.lock import acquire
from attnloom.core.jit.template import CSRC
from attnloom.core.jit.toolchain import recipe
from attnloom.core.jit.trust import refuse_foreign

_FOLDER = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,127})-([0-9a-f]{16})")


@dataclass(frozen=True)
class Entry:
    """A module in a cache, or the remains of a failed build.

    Attributes:
        name: of the module.
        key: the first 16 digits of its key.
        folder: where it lies.
        size: bytes, sources and logs included.
        built, used: seconds since the epoch. A module that its user may not write keeps the time it was built as the
            time it was used.
        arch, compiler: what it was built for and by; empty where its record cannot be read.
        state: ``ok``; ``stale``, built by other sources or flags than this attnloom has; ``failed``, a log and no
            module; ``damaged`` or ``refused``, see ``reason``.
        reason: why it is not used.
    """

    name: str
    key: str
    folder: Path
    size: int
    built: float
    used: float
    arch: str
    compiler: str
    state: str
    reason: str = ""


def entries(cache: Cache) -> list[Entry]:
    """All that lies in a cache, by name. Reads every library, to compare it with its record.

    Raises:
        CacheUnusable: the cache's folder cannot be read, or others can write it.
    """
    if not cache.trusted():
        return []
    folders = [*_folders(cache.root), *_folders(cache.root / "failed")]
    found = (_entry(folder, failed=folder.parent != cache.root) for folder in folders)
    return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.name, entry.key))


def choose(
    found: Iterable[Entry], *, older_than: float | None = None, max_size: int | None = None, unusable: bool = False
) -> list[Entry]:
    """The entries that a prune removes: those that meet any of the conditions.

    Args:
        found: what there is.
        older_than: seconds; entries that were last used longer ago.
        max_size: bytes; the entries that were last used longest ago, until the rest is no larger.
        unusable: entries in another state than ``ok``.
    """
    newest = sorted(found, key=lambda entry: entry.used, reverse=True)
    now, kept, chosen = time.time(), 0, []
    for entry in newest:
        if (older_than is not None and now - entry.used > older_than) or (unusable and entry.state != "ok"):
            chosen.append(entry)
            continue
        kept += entry.size
        if max_size is not None and kept > max_size:
            chosen.append(entry)
    return chosen


def remove(cache: Cache, chosen: Iterable[Entry]) -> list[Entry]:
    """Remove entries; gives those that are gone. One that a build holds just now stays.

    A process that has loaded a module keeps it.

    Raises:
        CacheUnusable: the cache cannot be written.
    """
    cache.prepare()
    gone: list[Entry] = []
    with cache.private_folder() as private:
        for entry in chosen:
            with cache.writing():
                lock = acquire(cache.root / f".lock-{entry.folder.name}", wait=False)
                if lock is None:
                    continue
                try:
                    # In one step, so that nobody finds half a module.
                    with contextlib.suppress(FileNotFoundError):
                        entry.folder.rename(private / f"{len(gone)}")
                    gone.append(entry)
                finally:
                    lock.release()
    return gone


def is_stale(record: dict[str, object]) -> bool:
    """Whether a module's record names sources or flags that this attnloom does not have: it will not ask for it.

    A module for another architecture is not stale: a machine that shares the cache may ask for it.
    """
    csrc = record.get("csrc")
    if not isinstance(csrc, dict):
        return True  # by an attnloom that did not write down of what it was built
    for name, digest in csrc.items():
        path = CSRC / str(name)
        if not path.is_file() or fingerprint(path.read_text(encoding="utf-8")) != digest:
            return True
    try:
        ours = recipe(str(record.get("family")), str(record.get("target", "")))
    except JitError:
        return True
    return ours.arch == record.get("arch") and ours.flags != record.get("flags")


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]


def _entry(folder: Path, *, failed: bool) -> Entry | None:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None  # _folders looked
    try:
        files = [path.lstat() for path in folder.rglob("*")]
        built = _time(folder / LIBRARY) or _time(folder)
        used = max(_time(folder / RECORD), built)
    except OSError:
        return None  # removed meanwhile
    record: dict[str, object] = {}
    state, reason = "failed" if failed else "ok", ""
    if not failed:
        try:
            refuse_foreign(folder, folder.stat())
            record = read_record(folder)
            checked_library(folder, str(record.get("key")))
            if is_stale(record):
                state, reason = "stale", "built by other sources or flags"
        except JitError as error:
            state, reason = "refused" if isinstance(error, CacheUnusable) else "damaged", str(error)
    return Entry(
        name=match[1],
        key=match[2],
        folder=folder,
        size=sum(status.st_size for status in files),
        built=built,
        used=used,
        arch=str(record.get("arch", "")),
        compiler=str(record.get("compiler", "")),
        state=state,
        reason=reason,
    )


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0
