"""What the cache keeps, what it refuses, and what is said then."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnloom.core.errors import CacheUnusable, CompilerNotFound, JitDisabled, LoadFailed
from attnloom.core.jit import build, load
from attnloom.core.jit.cache import Cache
from tests.core.jit.helpers import ROOT, CountingCompiler, environment, run, spec

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's files, which only root can make")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which tmp_path is not."""
    folder = Path(tempfile.mkdtemp(prefix="attnloom-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_build_is_private(cache: Path) -> None:
    before = os.umask(0)
    try:
        (library,) = build([spec()])
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, library.parent, library)] == [0o700] * 3
    assert build([spec()]) == [library]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "There is no room to write: free some"),
        (errno.EDQUOT, "There is no room to write: free some"),
        (errno.EFBIG, "There is no room to write: free some, raise the quota or the limit on file sizes"),
        (errno.EEXIST, "Something that is no folder is in the way"),
        (errno.EACCES, "Make it writable for user"),
        (errno.EROFS, "Make it writable for user"),
    ],
)
def test_the_remedy_is_that_of_the_error(tmp_path: Path, number: int, remedy: str) -> None:
    with pytest.raises(CacheUnusable) as raised, Cache(tmp_path).writing():
        raise OSError(number, os.strerror(number))
    assert str(raised.value).startswith(f"cannot write the cache folder {tmp_path}: [Errno {number}] ")
    assert f". {remedy}" in str(raised.value)


def test_a_warm_load_needs_no_compile(cache: Path, tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "compiler")
    env = environment(cache, CXX=str(compiler.path))
    code = "begin = time.perf_counter(); load(spec()); print(time.perf_counter() - begin)"
    run(code, env)
    assert compiler.count == 1
    # The best of a few: the bound is on our work, not on what else this machine does.
    assert min(float(run(code, env)) for _ in range(5)) <= 0.050
    assert compiler.count == 1


def test_touched_files_and_moved_folders_still_hit_and_an_edit_misses(tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "compiler")
    checkout = tmp_path / "checkout"
    for name in ("core", "csrc"):
        shutil.copytree(ROOT / name, checkout / "attnloom" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "attnloom" / "__init__.py", checkout / "attnloom")
    code = """
text = '#include "common/params.h"\\nextern "C" __attribute__((visibility("default"))) int one() { return 1; }\\n'
print(load(ModuleSpec("probe", (Source("probe.cpp", text),))).one())
"""

    def compiled(checkout: Path, cache: Path) -> int:
        assert run(code, environment(cache, root=checkout, CXX=str(compiler.path))) == "1"
        return compiler.count

    assert compiled(checkout, tmp_path / "cache") == 1
    for path in checkout.rglob("*"):
        os.utime(path)
    assert compiled(checkout, tmp_path / "cache") == 1
    checkout = checkout.rename(tmp_path / "moved")
    cache = (tmp_path / "cache").rename(tmp_path / "moved-cache")
    assert compiled(checkout, cache) == 1
    with (checkout / "attnloom" / "csrc" / "common" / "params.h").open("a") as header:
        header.write("// edited\n")
    assert compiled(checkout, cache) == 2


def test_a_machine_without_a_compiler_uses_what_was_built_ahead(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = build([spec()])
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    copy.chmod(0o700)
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(copy))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build([spec()]) == [copy / library.relative_to(cache)]
    monkeypatch.setenv("ATTNLOOM_JIT", "off")
    assert build([spec()]) == [copy / library.relative_to(cache)]
    monkeypatch.setenv("ATTNLOOM_JIT", "on")
    with pytest.raises(CompilerNotFound):
        build([spec(value=43)])


def test_another_compiler_builds_its_own(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build([spec()])
    other = CountingCompiler(tmp_path / "other")
    script = other.path.read_text().replace(
        "#!/bin/sh\n", '#!/bin/sh\n[ "$1" = --version ] && echo "other 99" && exit\n'
    )
    other.path.write_text(script)
    monkeypatch.setenv("CXX", str(other.path))
    monkeypatch.setenv("ATTNLOOM_JIT", "off")
    build([spec()])  # nothing may be built: the module of the first compiler will do
    assert other.count == 0
    monkeypatch.setenv("ATTNLOOM_JIT", "on")
    build([spec()])
    assert other.count == 1
    assert len(list(cache.glob("probe-*"))) == 2


@pytest.mark.parametrize("present", [False, True])
def test_jit_off_makes_a_miss_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    if present:
        build([spec(value=1)])
    monkeypatch.setenv("ATTNLOOM_JIT", "off")
    with pytest.raises(JitDisabled, match=r"module probe \(key [0-9a-f]{16}\).*ATTNLOOM_JIT=off") as caught:
        load(spec(value=2))
    assert caught.value.module == "probe"
    assert caught.value.key[:16] in str(caught.value)
    assert cache.exists() == present, "a lookup makes no folder"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
@pytest.mark.parametrize("where", [".", "module", "module/module.so"])
@pytest.mark.parametrize("jit", ["on", "off"])
def test_a_cache_that_others_can_write_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, mode: int, where: str, jit: str
) -> None:
    (library,) = build([spec()])
    path = cache / where.replace("module/", f"{library.parent.name}/")
    path = library.parent if where == "module" else path
    path.chmod(mode)
    monkeypatch.setenv("ATTNLOOM_JIT", jit)
    with pytest.raises(CacheUnusable, match=rf"refusing .*mode {mode:04o} lets others write.*chmod -R go-w") as caught:
        load(spec())
    assert caught.value.folder is not None and caught.value.folder.resolve() == path.resolve()


def test_an_empty_cache_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(CacheUnusable, match="mode 0777 lets others write"):
        build([spec()])
    assert not list(cache.iterdir())


@as_root
@pytest.mark.parametrize("where", [".", "module", "module.so"])
def test_a_cache_of_another_user_is_refused(cache: Path, where: str) -> None:
    (library,) = build([spec()])
    os.chown({".": cache, "module": library.parent, "module.so": library}[where], 12345, 12345)
    with pytest.raises(CacheUnusable, match=f"belongs to user 12345, not to user {os.geteuid()}"):
        load(spec())


def test_a_cache_below_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        CacheUnusable, match=r"cannot write the cache folder .*/file/cache.*ATTNLOOM_CACHE_DIR"
    ) as caught:
        load(spec())
    assert caught.value.folder == tmp_path / "file" / "cache"


def test_a_cache_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(mode=0o600)
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheUnusable, match=r"the cache .* is no folder. Set ATTNLOOM_CACHE_DIR to a folder"):
        load(spec())


def test_a_read_only_cache_serves_hits_and_names_itself_on_a_miss(open_folder: Path) -> None:
    cache = open_folder / "cache"
    env = environment(cache)
    run("load(spec('hit'))", env)
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o555 if path.is_dir() or path.suffix == ".so" else 0o444)
    # Modes do not bind root, so there the child becomes nobody once its imports are done.
    code = """
import subprocess, jinja2, ninja
if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)
print(load(spec("hit")).answer())
try: load(spec("missed"))
except CacheUnusable as error: print(error.folder, "|", error)
"""
    try:
        hit, miss = run(code, env).splitlines()
    finally:
        for path in (cache, *cache.rglob("*")):
            path.chmod(0o700)
    assert hit == "42"
    assert miss.startswith(f"{cache} | cannot write the cache folder {cache}: ")
    assert "set ATTNLOOM_CACHE_DIR" in miss


def truncate(library: Path) -> None:
    with library.open("r+b") as file:
        file.truncate(library.stat().st_size // 2)


def flip(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 0xFF
    library.write_bytes(data)


DAMAGE = {
    "cut off": truncate,
    "one byte": flip,
    "empty": lambda library: library.write_bytes(b""),
    "gone": lambda library: library.unlink(),
    "no record": lambda library: (library.parent / "build.json").unlink(),
    "cut off record": lambda library: truncate(library.parent / "build.json"),
    "strange record": lambda library: (library.parent / "build.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_module_is_never_used(
    cache: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    module = spec("damaged_" + damage.replace(" ", "_"))
    (library,) = build([module])
    DAMAGE[damage](library)
    monkeypatch.setenv("ATTNLOOM_JIT", "off")
    with pytest.raises(LoadFailed, match=rf"{library.parent}/\S+ is damaged: ") as caught:
        load(module)
    assert caught.value.file is not None and caught.value.file.parent == library.parent
    monkeypatch.setenv("ATTNLOOM_JIT", "on")
    assert load(module).answer() == 42
    assert compiler.count == 2
    assert not list(cache.glob(".*"))


def test_a_module_of_another_key_is_not_used(cache: Path, compiler: CountingCompiler) -> None:
    one, two = build([spec(value=1), spec(value=2)])
    shutil.rmtree(two.parent)
    shutil.copytree(one.parent, two.parent)
    build([spec(value=2)])
    assert compiler.count == 3


def test_a_library_that_the_linker_refuses(cache: Path) -> None:
    import hashlib

    (library,) = build([spec("refused")])
    library.write_bytes(b"no library")
    record = json.loads((library.parent / "build.json").read_text())
    record["sha256"] = hashlib.sha256(b"no library").hexdigest()
    (library.parent / "build.json").write_text(json.dumps(record))
    with pytest.raises(LoadFailed, match=rf"cannot load {library}: .*Remove the folder") as caught:
        load(spec("refused"))
    assert caught.value.file == library
