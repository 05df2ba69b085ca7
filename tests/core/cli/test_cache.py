"""`attnloom cache`: what it lists and what it removes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from attnloom.core.jit import build
from tests.core.cli.helpers import attnloom
from tests.core.jit.helpers import spec

DAY = 86400.0


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of three modules: used today, 3 and 40 days ago."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(folder))
    libraries = build([spec(name) for name in ("today", "lately", "long_ago")])
    for library, days in zip(libraries, (0, 3, 40), strict=True):
        then = time.time() - days * DAY - 5
        for path in (library, library.with_name("build.json")):
            os.utime(path, (then, then))
    return folder


def left(folder: Path) -> set[str]:
    return {path.parent.name.partition("-")[0] for path in folder.glob("*/module.so")}


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "none"))
    assert f"0 modules, 0 B, in {tmp_path / 'none'}" in attnloom("cache", "list").out
    assert "0 modules, 0 B; 0 modules left" in attnloom("cache", "prune", "--all").out
    assert not (tmp_path / "none").exists()


def test_a_cache_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (str(file), "/dev/null"):
        monkeypatch.setenv("ATTNLOOM_CACHE_DIR", place)
        for arguments in (("list",), ("prune", "--all"), ("list", "--json")):
            ran = attnloom("cache", *arguments)
            assert ran.status == 1 and not ran.out
            assert ran.err.startswith(f"attnloom: the cache {place} is no folder. Set ATTNLOOM_CACHE_DIR to a folder")


def test_the_list(modules: Path) -> None:
    ran = attnloom("cache", "list")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert [line.partition("-")[0] for line in lines[1:4]] == ["today", "lately", "long_ago"]
    assert "3 days ago" in lines[2] and "40 days ago" in lines[3] and lines[3].rstrip().endswith("ok")
    table = attnloom("cache", "list", "--json").json
    assert table["cache"] == str(modules)
    assert [entry["name"] for entry in table["entries"]] == ["today", "lately", "long_ago"]
    assert all(entry["size"] >= (Path(entry["folder"]) / "module.so").stat().st_size for entry in table["entries"])
    assert "3 modules, " in lines[4] and str(modules) in lines[4]


def test_a_damaged_module_is_listed_with_the_reason(modules: Path) -> None:
    next(modules.glob("today-*/module.so")).write_bytes(b"")
    out = attnloom("cache", "list").out
    assert "damaged" in out and "its content is not what was built" in out


def test_prune_by_age(modules: Path) -> None:
    dry = attnloom("cache", "prune", "--older-than", "30d", "--dry-run")
    assert "would remove long_ago-" in dry.out and left(modules) == {"today", "lately", "long_ago"}
    ran = attnloom("cache", "prune", "--older-than", "30d")
    assert "removed long_ago-" in ran.out and "2 modules left" in ran.out
    assert left(modules) == {"today", "lately"}
    attnloom("cache", "prune", "--older-than", "1h")
    assert left(modules) == {"today"}


def test_prune_by_size(modules: Path) -> None:
    entries = attnloom("cache", "list", "--json").json["entries"]
    attnloom("cache", "prune", "--max-size", entries[0]["size"] + entries[1]["size"])
    assert left(modules) == {"today", "lately"}
    attnloom("cache", "prune", "--max-size", "1")
    assert left(modules) == set()


def test_prune_what_is_stale(modules: Path) -> None:
    assert "0 modules, 0 B; 3 modules left" in attnloom("cache", "prune", "--stale").out
    record = next(modules.glob("today-*/build.json"))
    record.write_text(record.read_text().replace('"flags": "', '"flags": "-DOTHER '))
    assert "stale" in attnloom("cache", "list").out
    assert "removed today-" in attnloom("cache", "prune", "--stale").out
    assert left(modules) == {"lately", "long_ago"}


def test_prune_all_and_nothing(modules: Path) -> None:
    ran = attnloom("cache", "prune")
    assert ran.status == 2 and "expected one of --older-than" in " ".join(ran.err.split())
    assert left(modules) == {"today", "lately", "long_ago"}
    assert attnloom("cache", "prune", "--all").status == 0
    assert list(modules.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"), [("--older-than soon", "duration 'soon'"), ("--max-size big", "size 'big'")]
)
def test_bad_arguments(modules: Path, arguments: str, message: str) -> None:
    ran = attnloom("cache", "prune", *arguments.split())
    assert ran.status == 1 and message in ran.err
    assert left(modules) == {"today", "lately", "long_ago"}


def test_a_cache_that_others_can_write(modules: Path) -> None:
    modules.chmod(0o777)
    for command in ("list", "prune --all"):
        ran = attnloom("cache", *command.split())
        assert ran.status == 1 and "refusing the cache" in ran.err and "chmod -R go-w" in ran.err
    assert left(modules) == {"today", "lately", "long_ago"}
