"""Bundles: what is packed comes out elsewhere, and nothing else does."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attnloom.core.errors import BundleRefused, CacheUnusable, LoadFailed
from attnloom.core.jit import build
from attnloom.core.jit.bundle import pack, unpack
from attnloom.core.jit.cache import Cache
from tests.core.jit.helpers import environment, run, spec

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def bundle(cache: Path, tmp_path: Path) -> Path:
    """Two modules, packed."""
    file = tmp_path / "modules.tar.gz"
    pack(build([spec("one", 1), spec("two", 2)]), file, version="0")
    return file


def read(file: Path) -> Members:
    with tarfile.open(file) as archive:
        return [(member, (archive.extractfile(member) or io.BytesIO()).read()) for member in archive]


def write(file: Path, members: Members) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data))
    return file


def test_modules_work_without_a_compiler_where_they_are_unpacked(bundle: Path, cache: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    found = unpack(bundle, Cache(there))
    assert [(module.name, module.new) for module in found] == [("one", True), ("two", True)]
    shutil.rmtree(cache)
    empty = tmp_path / "empty"
    empty.mkdir()
    env = environment(there, PATH=str(empty), ATTNLOOM_JIT="off") | {"CXX": "no-such-compiler"}
    assert run("print(load(spec('one', 1)).answer(), load(spec('two', 2)).answer())", env) == "1 2"
    assert not list(there.glob(".*"))


def test_what_is_unpacked_is_ours_alone(bundle: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    before = os.umask(0)
    try:
        unpack(bundle, Cache(there))
    finally:
        os.umask(before)
    for path in (there, *there.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) in (0o700, 0o600) and path.stat().st_uid == os.geteuid()


def test_a_second_unpacking_changes_nothing_but_what_is_damaged(bundle: Path, tmp_path: Path) -> None:
    there = Cache(tmp_path / "there")
    first = unpack(bundle, there)
    assert [module.new for module in unpack(bundle, there)] == [False, False]
    first[0].library.write_bytes(b"")
    assert [module.new for module in unpack(bundle, there)] == [True, False]


def test_the_same_modules_give_the_same_bytes_and_name_nobody(bundle: Path, cache: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.tar.gz"
    libraries = build([spec("two", 2), spec("one", 1), spec("two", 2)])
    assert pack(libraries, again, version="0") == again.stat().st_size
    assert again.read_bytes() == bundle.read_bytes()
    for member, data in read(bundle):
        assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", 0)
        assert str(tmp_path).encode() not in data
    assert not list(tmp_path.glob("*.part"))


def test_a_damaged_module_is_not_packed(cache: Path, tmp_path: Path) -> None:
    (library,) = build([spec()])
    library.write_bytes(b"")
    with pytest.raises(LoadFailed, match="is damaged"):
        pack([library], tmp_path / "file", version="0")
    assert not (tmp_path / "file").exists()


# How an archive is spoiled, and what is said then. Each function changes one member or the list.
def rename(to: str) -> Callable[[Members], None]:
    def spoil(members: Members) -> None:
        manifest = json.loads(members[0][1])
        manifest["files"][to] = manifest["files"].pop(members[1][0].name)
        members[1][0].name = to
        data = json.dumps(manifest).encode()
        members[0][0].size = len(data)
        members[0] = (members[0][0], data)

    return spoil


def kind(of: bytes, target: str = "/etc/passwd") -> Callable[[Members], None]:
    def spoil(members: Members) -> None:
        members[1][0].type, members[1][0].linkname, members[1][0].size = of, target, 0

    return spoil


def owner(user: int, group: int) -> Callable[[Members], None]:
    def spoil(members: Members) -> None:
        members[2][0].uid, members[2][0].gid = user, group

    return spoil


def content(index: int, change: Callable[[bytes], bytes]) -> Callable[[Members], None]:
    def spoil(members: Members) -> None:
        data = change(members[index][1])
        members[index][0].size = len(data)
        members[index] = (members[index][0], data)

    return spoil


def manifest(change: Callable[[dict], object]) -> Callable[[Members], None]:  # type: ignore[type-arg]
    return content(0, lambda data: json.dumps(change(json.loads(data))).encode())


def swapped(members: Members) -> None:
    """A record of one module in the folder of another, with a manifest that agrees."""
    table = json.loads(members[0][1])
    record = json.loads(members[2][1])
    data = json.dumps({**record, "name": "other"}).encode()
    table["files"][members[2][0].name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    members[2][0].size = len(data)
    members[2] = (members[2][0], data)
    content(0, lambda _: json.dumps(table).encode())(members)


SPOILED: dict[str, tuple[Callable[[Members], object], str]] = {
    "above": (rename("../escaped-0123456789abcdef/module.so"), "expected a file that manifest.json names"),
    "absolute": (rename("/tmp/escaped-0123456789abcdef/module.so"), "expected a file that manifest.json names"),
    "deeper": (rename("a-0123456789abcdef/b/module.so"), "expected a file that manifest.json names"),
    "dotted": (rename("a-0123456789abcdef/../module.so"), "expected a file that manifest.json names"),
    "another file": (rename("a-0123456789abcdef/probe.cpp"), "expected a file that manifest.json names"),
    "hidden": (rename(".lock-0123456789abcdef/module.so"), "expected a file that manifest.json names"),
    "symlink": (kind(tarfile.SYMTYPE), "expected a plain file"),
    "hard link": (kind(tarfile.LNKTYPE), "expected a plain file"),
    "folder": (kind(tarfile.DIRTYPE), "expected a plain file"),
    "device": (kind(tarfile.CHRTYPE), "expected a plain file"),
    "pipe": (kind(tarfile.FIFOTYPE), "expected a plain file"),
    "another user's": (owner(1000, 0), "belongs to user 1000, expected root"),
    "another group's": (owner(0, 1000), "expected root"),
    "larger": (content(1, lambda data: data + b"more"), "expected a file that manifest.json names"),
    "one byte": (content(1, lambda data: data[:-1] + bytes([data[-1] ^ 1])), "not what manifest.json promises"),
    "twice": (lambda members: members.append(members[1]), "expected a file that manifest.json names"),
    "one missing": (lambda members: members.pop(), "is not whole: .* is missing"),
    "no manifest": (lambda members: members.pop(0), r"expected manifest\.json first"),
    "nothing": (lambda members: members.clear(), r"is not whole: manifest\.json is missing"),
    "later format": (manifest(lambda table: {**table, "format": 2}), "has format 2 .* expected format 1"),
    "a list": (manifest(lambda table: [table]), "is no table"),
    "no files": (manifest(lambda table: {"format": 1}), "no bundle of attnloom"),
    "no JSON": (content(0, lambda data: b"{"), "no bundle of attnloom"),
    "another record": (swapped, "its build.json is of another module"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_may_not_be_in_a_bundle(bundle: Path, tmp_path: Path, how: str) -> None:
    spoil, message = SPOILED[how]
    members = read(bundle)
    spoil(members)
    there = tmp_path / "deep" / "there"
    with pytest.raises(BundleRefused, match=message):
        unpack(write(tmp_path / "spoiled.tar.gz", members), Cache(there))
    assert list(there.iterdir()) == [], "nothing is left of it"
    assert [path.name for path in there.parent.iterdir()] == ["there"]
    assert not list(Path("/tmp").glob("escaped-*"))


@pytest.mark.parametrize("data", [b"", b"no archive", gzip.compress(b"no archive" * 100)])
def test_no_archive(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(BundleRefused, match=f"{file} is no bundle of attnloom"):
        unpack(file, Cache(tmp_path / "there"))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_bundle_that_was_cut_off(bundle: Path, tmp_path: Path, share: float) -> None:
    bundle.write_bytes(bundle.read_bytes()[: int(bundle.stat().st_size * share)])
    there = tmp_path / "there"
    with pytest.raises(BundleRefused):
        unpack(bundle, Cache(there))
    assert list(there.iterdir()) == []


def test_a_cache_that_others_can_write_gets_nothing(bundle: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o777)
    with pytest.raises(CacheUnusable, match="mode 0777"):
        unpack(bundle, Cache(there))
    assert list(there.iterdir()) == []
