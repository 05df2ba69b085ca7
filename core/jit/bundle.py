"""Modules on their way to a machine without a compiler: a tar.gz of cache folders, with a manifest.

::

    manifest.json                      format, attnloom's version, and of each file its size and sha256
    <name>-<key16>/module.so           what :mod:`attnloom.core.jit.cache` keeps
    <name>-<key16>/build.json

Nothing of an archive is believed: a member that the manifest does not name, or that is anything but a plain file of
root under one of these names and of the size and content that were promised, ends the unpacking, and nothing of it is
in the cache then.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from attnloom.core.errors import BundleRefused, LoadFailed
from attnloom.core.jit.cache import LIBRARY, RECORD, Cache, checked_library, read_record

MANIFEST = "manifest.json"
FORMAT = 1
_MEMBER = re.compile(rf"([A-Za-z_][A-Za-z0-9_]{{0,127}}-[0-9a-f]{{16}})/({re.escape(LIBRARY)}|{re.escape(RECORD)})")
_MANIFEST_LIMIT = 16 << 20  # bytes
_FILE_LIMIT = 1 << 30


@dataclass(frozen=True)
class Unpacked:
    """A module that a bundle held.

    Attributes:
        name: of the module.
        arch: what it was built for.
        library: where it is now.
        new: False where the cache had it.
    """

    name: str
    arch: str
    library: Path
    new: bool


def pack(libraries: Iterable[Path], file: Path, *, version: str) -> int:
    """Write a bundle of modules; gives its size in bytes. The same modules give the same bytes.

    Args:
        libraries: as :func:`attnloom.core.jit.build` gives them.
        file: the archive to write; it appears when it is whole.
        version: attnloom's.

    Raises:
        LoadFailed: a module is damaged.
        OSError: the file cannot be written.
    """
    contents: dict[str, bytes] = {}
    for library in sorted(set(libraries)):
        checked_library(library.parent, read_record(library.parent)["key"])
        for name in (LIBRARY, RECORD):
            contents[f"{library.parent.name}/{name}"] = (library.parent / name).read_bytes()
    manifest = {
        "format": FORMAT,
        "attnloom": version,
        "files": {name: {"size": len(data), "sha256": _sha256(data)} for name, data in contents.items()},
    }
    part = file.with_name(f"{file.name}.part")
    try:
        with (
            part.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, data in {MANIFEST: json.dumps(manifest, indent=1).encode(), **contents}.items():
                member = tarfile.TarInfo(name)  # of root, at the epoch
                member.size = len(data)
                member.mode = 0o600
                archive.addfile(member, io.BytesIO(data))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file.stat().st_size


def unpack(file: Path, cache: Cache) -> list[Unpacked]:
    """Put the modules of a bundle into a cache: all of them, or none.

    Raises:
        BundleRefused: it is no bundle, or holds what a bundle does not.
        CacheUnusable: the cache cannot be written, or others can write it.
        OSError: the file cannot be read.
    """
    cache.prepare()
    with cache.private_folder() as private:
        try:
            with tarfile.open(file, "r:gz") as archive:
                folders = _extract(archive, private, cache)
        except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError, KeyError, TypeError) as error:
            raise BundleRefused(f"{file} is no bundle of attnloom: {error}") from error
        records = {folder: _checked_record(private / folder) for folder in folders}
        with cache.locked(cache.root / folder for folder in folders):
            return [_install(cache, private / folder, records[folder]) for folder in folders]


def _extract(archive: tarfile.TarFile, private: Path, cache: Cache) -> list[str]:
    """Writes the members into ``private``; gives the names of the modules' folders."""
    promised: dict[str, tuple[int, str]] | None = None
    folders: list[str] = []
    for member in archive:
        if not member.isreg() or member.sparse is not None:
            raise BundleRefused(f"bundle member {member.name!r}: expected a plain file")
        if member.uid != 0 or member.gid != 0:
            raise BundleRefused(f"bundle member {member.name!r}: belongs to user {member.uid}, expected root")
        if promised is None:
            if member.name != MANIFEST or member.size > _MANIFEST_LIMIT:
                raise BundleRefused(f"bundle member {member.name!r}: expected {MANIFEST} first")
            promised = _promised(_read(archive, member))
            continue
        match = _MEMBER.fullmatch(member.name)
        size, digest = promised.pop(member.name, (-1, ""))
        if match is None or size != member.size or size > _FILE_LIMIT:
            raise BundleRefused(
                f"bundle member {member.name!r} of {member.size} bytes: expected a file that {MANIFEST} names"
            )
        data = _read(archive, member)
        if _sha256(data) != digest:
            raise BundleRefused(f"bundle member {member.name!r}: its content is not what {MANIFEST} promises")
        folder = private / match[1]
        with cache.writing():
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / match[2]).write_bytes(data)
            (folder / match[2]).chmod(0o700 if match[2] == LIBRARY else 0o600)
        if match[1] not in folders:
            folders.append(match[1])
    if promised is None or promised:
        raise BundleRefused(f"the bundle is not whole: {', '.join(promised or [MANIFEST])} is missing")
    return folders


def _promised(manifest: bytes) -> dict[str, tuple[int, str]]:
    content = json.loads(manifest)
    if not isinstance(content, dict):
        raise TypeError(f"its {MANIFEST} is no table")
    if content.get("format") != FORMAT:
        raise BundleRefused(
            f"the bundle has format {content.get('format')!r} and was written by attnloom {content.get('attnloom')!r}: "
            f"expected format {FORMAT}"
        )
    return {name: (int(file["size"]), str(file["sha256"])) for name, file in content["files"].items()}


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    reader = archive.extractfile(member)
    assert reader is not None  # it is a plain file
    return reader.read()


def _checked_record(folder: Path) -> dict[str, object]:
    """The record of an extracted module, whose folder has the name that the record gives it."""
    try:
        record = read_record(folder)
        checked_library(folder, record["key"])
    except (LoadFailed, KeyError) as error:
        raise BundleRefused(f"bundle folder {folder.name}: its {RECORD} and {LIBRARY} do not fit: {error}") from error
    if f"{record.get('name')}-{str(record.get('key'))[:16]}" != folder.name:
        raise BundleRefused(f"bundle folder {folder.name}: its {RECORD} is of another module")
    return record


def _install(cache: Cache, folder: Path, record: dict[str, object]) -> Unpacked:
    name, key, arch = str(record["name"]), str(record["key"]), str(record.get("arch", ""))
    try:
        if (library := cache.find(name, key)) is not None:
            return Unpacked(name, arch, library, new=False)
    except LoadFailed:
        pass  # damaged: replaced
    return Unpacked(name, arch, cache.adopt(folder, name, key), new=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
