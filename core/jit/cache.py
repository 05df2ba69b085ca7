"""The folder of built modules: what may be trusted in it, and how a module gets there.

::

    <root>/<name>-<first 16 digits of the key>/module.so, build.json, the sources, their logs
    <root>/failed/<same>/        the last failed build of a module, for its log
    <root>/.build-*              private folder of a build in progress
    <root>/.lock-*               held while a module is built

A module is code that runs in this process, so a folder into which others could put one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnloom.core.errors import CacheUnusable, LoadFailed
from attnloom.core.jit.lock import Lock, acquire
from attnloom.core.jit.trust import refuse_foreign

LIBRARY = "module.so"
RECORD = "build.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Cache:
    """The cache at ``root``, which need not exist yet."""

    root: Path

    def folder(self, name: str, key: str) -> Path:
        """Where the module of this name and key is, or would be."""
        return self.root / f"{name}-{key[:16]}"

    def failed_folder(self, name: str, key: str) -> Path:
        """Where a failed build of this module leaves its sources and logs."""
        return self.root / "failed" / f"{name}-{key[:16]}"

    def find(self, name: str, key: str) -> Path | None:
        """The library of this module, checked against its record, or None.

        Raises:
            CacheUnusable: others could have written it.
            LoadFailed: it is there, but damaged.
        """
        folder = self.folder(name, key)
        if not self.trusted(folder):
            return None
        return checked_library(folder, key)

    def find_content(self, name: str, content: str) -> Path | None:
        """A library of the same content by whichever compiler, or None: for a machine that has no compiler.

        Raises: as :meth:`find`.
        """
        if not self.trusted():
            return None
        for folder in sorted(self.root.glob(f"{name}-" + "[0-9a-f]" * 16)):
            if self.trusted(folder) and (record := read_record(folder)).get("content") == content:
                return checked_library(folder, record["key"])
        return None

    def prepare(self) -> None:
        """Make the folder (0700) if it is missing, and clear what killed builds left in it.

        Raises:
            CacheUnusable: it cannot be made or written, or is not ours alone.
        """
        with self.writing():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.trusted()
            self._prune()

    @contextlib.contextmanager
    def locked(self, folders: Iterable[Path]) -> Iterator[dict[Path, Lock]]:
        """Hold the locks of several modules' folders; the block may release some early by popping them from the dict.

        They are taken in sorted order, so that two processes with overlapping lists cannot wait for each other.
        """
        held: dict[Path, Lock] = {}
        try:
            for folder in sorted(set(folders)):
                with self.writing():
                    lock = acquire(self.root / f".lock-{folder.name}")
                assert lock is not None  # acquire() waits
                held[folder] = lock
            yield held
        finally:
            for lock in held.values():
                lock.release()

    @contextlib.contextmanager
    def private_folder(self) -> Iterator[Path]:
        """A folder of one build, removed at the end. Its lock tells others that its owner lives."""
        with self.writing():
            folder, lock = self._private_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()

    def publish(self, built: Path, name: str, key: str, record: dict[str, Any]) -> Path:
        """Move a finished build from a private folder to its place, in one rename; gives the library's path.

        The caller holds the module's lock.
        """
        with self.writing():
            library = built / LIBRARY
            library.chmod(0o700)  # whatever the umask, others must not write it
            record = {**record, "name": name, "key": key, "sha256": sha256(library)}
            (built / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        return self.adopt(built, name, key)

    def adopt(self, built: Path, name: str, key: str) -> Path:
        """Move a folder that holds a library and its record to its place; see :meth:`publish`."""
        with self.writing():
            place = self.folder(name, key)
            if place.exists():  # damaged, or we would not have built
                place.rename(built.with_name(f"{built.name}.damaged"))
            built.rename(place)
            shutil.rmtree(self.failed_folder(name, key), ignore_errors=True)
        return place / LIBRARY

    def keep_failed(self, built: Path, name: str, key: str) -> Path:
        """Move a failed build out of its private folder, so that its log can be read; gives the new folder."""
        place = self.failed_folder(name, key)
        with self.writing():
            place.parent.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            built.rename(place)
        return place

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError of the block into CacheUnusable."""
        try:
            yield
        except OSError as error:
            raise CacheUnusable(
                f"cannot write the cache folder {self.root}: {error}. {_remedy(error)}", folder=self.root
            ) from error

    def trusted(self, path: Path | None = None) -> bool:
        """Whether ``path``, by default the root, exists.

        Raises:
            CacheUnusable: it, or the root above it, is not ours alone or cannot be read.
        """
        for folder in dict.fromkeys((self.root, path or self.root)):
            try:
                status = folder.stat()
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as error:
                raise CacheUnusable(f"cannot read the cache folder {folder}: {error}", folder=folder) from error
            if folder == self.root and not stat.S_ISDIR(status.st_mode):
                raise CacheUnusable(
                    f"the cache {folder} is no folder. Set ATTNLOOM_CACHE_DIR to a folder.",
                    folder=folder,
                )
            refuse_foreign(folder, status)
        return True

    def _prune(self) -> None:
        for lock_file in self.root.glob(".lock-*"):
            with contextlib.suppress(OSError):  # what cannot be cleared does no harm
                if (lock := acquire(lock_file, wait=False)) is not None:
                    lock.release()
        for folder in self.root.glob(".build-*"):
            with contextlib.suppress(OSError):  # another process may be clearing it too
                if (lock := acquire(folder / "owner", wait=False)) is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.release()

    def _private_folder(self) -> tuple[Path, Lock]:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=".build-", dir=self.root))  # 0700
            with contextlib.suppress(FileNotFoundError):  # pruned before we had locked it: take another
                lock = acquire(folder / "owner")
                assert lock is not None  # acquire() waits
                return folder, lock


def _remedy(error: OSError) -> str:
    """What to do where the cache cannot be written."""
    if error.errno in _NO_ROOM:
        return (
            "There is no room to write: free some, raise the quota or the limit on file sizes (ulimit -f), or set "
            "ATTNLOOM_CACHE_DIR to a folder on another disk."
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "Something that is no folder is in the way: set ATTNLOOM_CACHE_DIR to a folder."
    return (
        f"Make it writable for user {os.geteuid()}, or set ATTNLOOM_CACHE_DIR to a folder that is, or fill the cache "
        "ahead where it can be written."
    )


def mark_used(library: Path) -> None:
    """Remember that a module was used now: the time of its record, where we may set it."""
    with contextlib.suppress(OSError):
        os.utime(library.with_name(RECORD))


def read_record(folder: Path) -> dict[str, Any]:
    """What is written about the module in ``folder``.

    Raises:
        LoadFailed: there is nothing, or it is damaged.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder / RECORD, f"unreadable ({error})") from error
    if not isinstance(record, dict):
        raise _damaged(folder / RECORD, "not a record")
    return record


def checked_library(folder: Path, key: str) -> Path:
    """The library in ``folder``, compared with its record.

    Raises:
        CacheUnusable: others could have written it.
        LoadFailed: it is damaged, or made for another key.
    """
    library = folder / LIBRARY
    record = read_record(folder)
    if record.get("key") != key:
        raise _damaged(folder / RECORD, f"made for key {record.get('key')}, not {key}")
    try:
        refuse_foreign(library, library.stat())
        # The linker maps a cut-off file without complaint and the process dies at the first touch of its missing end.
        whole = sha256(library) == record.get("sha256")
    except OSError as error:
        raise _damaged(library, f"unreadable ({error})") from error
    if not whole:
        raise _damaged(library, "its content is not what was built")
    return library


def _damaged(file: Path, reason: str) -> LoadFailed:
    return LoadFailed(
        f"{file} is damaged: {reason}. Remove the folder {file.parent}; it will be built anew.", file=file
    )


def sha256(path: Path) -> str:
    """Hash of a file's content, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
