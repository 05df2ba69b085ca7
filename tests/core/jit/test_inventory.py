"""What a cache holds, how old it is, and how it is removed."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from attnloom.core.errors import CacheUnusable, CompileFailed
from attnloom.core.host import host_spec
from attnloom.core.jit import ModuleSpec, Rendering, Source, build, key, load, template
from attnloom.core.jit import inventory as inventory_module
from attnloom.core.jit.cache import Cache
from attnloom.core.jit.inventory import Entry, choose, entries, is_stale, remove
from attnloom.core.jit.key import fingerprint, headers, ingredients
from attnloom.core.jit.lock import acquire
from tests.core.jit.helpers import CountingCompiler, environment, run, spec

HOUR = 3600.0


def age(library: Path, seconds: float) -> None:
    """Make a module look as if it had been built and used that long ago."""
    then = time.time() - seconds
    for path in (library, library.with_name("build.json")):
        os.utime(path, (then, then))


def test_an_empty_or_missing_cache(cache: Path) -> None:
    assert entries(Cache(cache)) == []
    assert not cache.exists(), "a look makes no folder"
    assert remove(Cache(cache), []) == []


def test_what_is_there(cache: Path) -> None:
    (library,) = build([spec()])
    (entry,) = entries(Cache(cache))
    record = json.loads(library.with_name("build.json").read_text())
    assert (entry.name, entry.key, entry.folder) == ("probe", record["key"][:16], library.parent)
    assert entry.size == sum(path.stat().st_size for path in library.parent.rglob("*"))
    assert entry.size > library.stat().st_size > 0
    assert (entry.arch, entry.compiler, entry.state) == (record["arch"], record["compiler"], "ok")
    assert abs(entry.used - time.time()) < HOUR and entry.used >= entry.built


def test_a_load_is_a_use(cache: Path) -> None:
    (library,) = build([spec()])
    age(library, 10 * HOUR)
    (before,) = entries(Cache(cache))
    assert time.time() - before.used > 9 * HOUR
    run("load(spec())", environment(cache))
    (after,) = entries(Cache(cache))
    assert time.time() - after.used < HOUR
    assert after.built == before.built


def test_other_sources_and_flags_make_a_module_stale(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "a.h").write_text("#define A 1\n")
    (csrc / "b.cpp.jinja").write_text('#include "a.h"\n{% include "c.jinja" %}\n')
    (csrc / "c.jinja").write_text("int c = {{ c }};\n")
    for module in (key, template, inventory_module):
        monkeypatch.setattr(module, "CSRC", csrc)
    template._environment.cache_clear()
    made = ModuleSpec("made", (Source("made.cpp", Rendering.of("b.cpp.jinja", c=1)),))
    (library,) = build([made])
    template._environment.cache_clear()

    def state() -> str:
        (entry,) = entries(Cache(cache))
        return entry.state

    assert state() == "ok"
    for name in ("a.h", "b.cpp.jinja", "c.jinja"):
        before = (csrc / name).read_text()
        os.utime(csrc / name)
        assert state() == "ok"
        (csrc / name).write_text(f"{before}// edited\n")
        assert state() == "stale"
        (csrc / name).unlink()
        assert state() == "stale"
        (csrc / name).write_text(before)
        assert state() == "ok"
    record = json.loads(library.with_name("build.json").read_text())
    assert not is_stale(record)
    assert is_stale({**record, "flags": "-O0"})
    assert not is_stale({**record, "flags": "-O0", "arch": "another machine's"})
    assert is_stale({**record, "family": "none of ours"})
    assert is_stale({name: value for name, value in record.items() if name != "csrc"})


def test_a_source_that_lies_in_csrc_as_it_is_belongs_to_the_ingredients() -> None:
    found = ingredients(host_spec(), headers(host_spec()))
    assert {"planner/planner.cpp", "planner/scan.h", "cpu/merge.cpp"} <= set(found)
    assert found["planner/planner.cpp"] == fingerprint((template.CSRC / "planner" / "planner.cpp").read_text())


def test_failed_damaged_and_refused(cache: Path) -> None:
    with pytest.raises(CompileFailed):
        build([ModuleSpec("broken", (Source("broken.cpp", "int x = no_such_name;\n"),))])
    for name in ("cut", "loose", "sound"):
        build([spec(name)])
    libraries = {path.parent.name.partition("-")[0]: path for path in cache.glob("*/module.so")}
    libraries["cut"].write_bytes(b"")
    libraries["loose"].parent.chmod(0o777)
    found = {entry.name: entry for entry in entries(Cache(cache))}
    assert {name: entry.state for name, entry in found.items()} == {
        "broken": "failed",
        "cut": "damaged",
        "loose": "refused",
        "sound": "ok",
    }
    assert "not what was built" in found["cut"].reason and "mode 0777" in found["loose"].reason
    gone = remove(Cache(cache), choose(found.values(), unusable=True))
    assert {entry.name for entry in gone} == {"broken", "cut", "loose"}
    assert [entry.name for entry in entries(Cache(cache))] == ["sound"]
    assert not list(cache.glob(".*"))


def test_a_cache_that_others_can_write_is_not_listed(cache: Path) -> None:
    build([spec()])
    cache.chmod(0o777)
    with pytest.raises(CacheUnusable, match="refusing the cache"):
        entries(Cache(cache))


def entry(name: str, *, used: float, size: int, state: str = "ok") -> Entry:
    now = time.time()
    return Entry(name, "0" * 16, Path(name), size, now - used, now - used, "", "", state)


def test_what_a_prune_chooses() -> None:
    found = [
        entry("new", used=1, size=100),
        entry("old", used=10 * HOUR, size=1),
        entry("mid", used=HOUR, size=50),
        entry("stale", used=2, size=10, state="stale"),
    ]

    def names(**conditions: object) -> set[str]:
        return {chosen.name for chosen in choose(found, **conditions)}  # type: ignore[arg-type]

    assert names() == set()
    assert names(older_than=2 * HOUR) == {"old"}
    assert names(unusable=True) == {"stale"}
    assert names(max_size=161) == set()
    assert names(max_size=160) == {"old"}
    # Longest unused first, even where a smaller one that was used earlier would still fit.
    assert names(max_size=120) == {"mid", "old"}
    assert names(max_size=150, unusable=True) == {"stale", "old"}
    assert names(max_size=0) == {"new", "old", "mid", "stale"}


def test_a_module_that_is_being_built_stays(cache: Path) -> None:
    (library,) = build([spec()])
    lock = acquire(cache / f".lock-{library.parent.name}")
    assert lock is not None
    assert remove(Cache(cache), entries(Cache(cache))) == []
    lock.release()
    assert [entry.name for entry in remove(Cache(cache), entries(Cache(cache)))] == ["probe"]
    assert list(cache.iterdir()) == []


def test_a_loaded_module_outlives_its_removal(cache: Path) -> None:
    module = spec("outlives")
    library = load(module)
    remove(Cache(cache), entries(Cache(cache)))
    assert library.answer() == 42
    assert load(module) is library


def test_a_module_that_is_removed_while_it_is_looked_up_is_built_again(
    cache: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    module = spec("looked_up")
    build([module])
    loader = sys.modules[load.__module__]
    find = loader.locate

    def then_removed(wanted: ModuleSpec) -> Path | None:
        found = find(wanted)
        shutil.rmtree(next(cache.glob("looked_up-*")))
        return found

    monkeypatch.setattr(loader, "locate", then_removed)
    assert load(module).answer() == 42
    assert compiler.count == 2
