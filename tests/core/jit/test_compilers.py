"""Compilers that warn, fail without a reason, make nothing, or hang."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from attnloom.core.errors import CompileFailed, CompilerNotFound, CompileTimedOut
from attnloom.core.jit import ModuleSpec, Source, build, failure, load, ninja, process, toolchain
from tests.core.jit.helpers import CountingCompiler, spec


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for compilers for a second, not for minutes."""
    for module in (ninja, failure):
        monkeypatch.setattr(module, "HANG_SECONDS", 1.0)
    monkeypatch.setattr(process, "_GRACE_SECONDS", 1.0)
    monkeypatch.setattr(toolchain, "ASK_SECONDS", 0.5)


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, before: str) -> CountingCompiler:
    compiler = CountingCompiler(folder, before=before)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_warnings_are_kept_and_do_no_harm(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path / "warns", "echo 'probe.cpp:1:1: warning: this is no error: it is a warning' >&2")
    library = build([spec("warned")])[0]
    assert load(spec("warned")).answer() == 42
    assert "this is no error" in (library.parent / "probe.log").read_text()


def test_a_warning_is_not_what_a_failure_is_blamed_on(cache: Path) -> None:
    text = "#warning an error may follow\nint x = no_such_name;\n"
    with pytest.raises(CompileFailed) as caught:
        build([ModuleSpec("warned", (Source("warned.cpp", text),))])
    assert "warned.cpp:2:" in caught.value.diagnostic and "no_such_name" in caught.value.diagnostic


def test_a_compiler_that_makes_nothing_and_says_so_to_nobody(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path / "idle", "exit 0")
    with pytest.raises(CompileFailed, match="building probe failed") as caught:
        build([spec()])
    assert caught.value.diagnostic
    assert not list(cache.glob(".*"))


@pytest.mark.parametrize("listens", [True, False])
def test_a_compiler_that_hangs_is_ended(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None, listens: bool
) -> None:
    pids = tmp_path / "pids"
    deaf = "" if listens else "trap '' TERM INT HUP;"
    # The sleep is a child of the compiler, as cc1plus is one of g++.
    compiler = use(monkeypatch, tmp_path / "hangs", f"{deaf} echo $$ >> {pids}; sleep 300 & echo $! >> {pids}; wait $!")
    begin = time.monotonic()
    with pytest.raises(CompileTimedOut, match="building probe was given up: no compiler ended within") as caught:
        build([spec()])
    assert time.monotonic() - begin < 30
    assert "probe.cpp" in caught.value.command and caught.value.log is not None and caught.value.log.exists()
    assert isinstance(caught.value, CompileFailed)
    assert compiler.count == 1
    for pid in map(int, pids.read_text().split()):
        deadline = time.monotonic() + 10
        while alive(pid):
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.05)
    assert not list(cache.glob(".*")), "no lock and no private folder is left"
    use(monkeypatch, tmp_path / "works", "")
    assert build([spec()])[0].is_file()


def test_steps_that_end_keep_a_long_build_alive(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """The limit is on one step, not on the build."""
    monkeypatch.setattr(ninja, "HANG_SECONDS", 2.0)
    monkeypatch.setattr(ninja, "job_limit", lambda: 1)
    use(monkeypatch, tmp_path / "slow", "sleep 0.7")
    begin = time.monotonic()
    assert len(build([spec(f"slow{index}", index) for index in range(4)])) == 4
    assert time.monotonic() - begin > 2.0


def test_what_is_quick_is_kept_where_another_hangs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr(ninja, "HANG_SECONDS", 3.0)
    monkeypatch.setattr(ninja, "job_limit", lambda: 2)
    compiler = use(monkeypatch, tmp_path / "hangs", 'case "$*" in *stuck*) exec sleep 300;; esac')
    with pytest.raises(CompileTimedOut, match="building stuck was given up"):
        build([spec("stuck"), spec("quick")])
    assert build([spec("quick")])[0].is_file()
    assert compiler.count == 2


def test_a_compiler_that_hangs_when_it_is_asked_who_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    asleep = tmp_path / "asleep"
    asleep.write_text("#!/bin/sh\nexec sleep 300\n")
    asleep.chmod(0o700)
    monkeypatch.setenv("CXX", str(asleep))
    with pytest.raises(CompilerNotFound, match=r"asleep --version failed: .*timed out after 0\.5 seconds"):
        build([spec()])


def test_the_lines_of_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo \xff\nthr")
    lines = process.lines_of(reading, 0.2)
    assert [next(lines), next(lines)] == ["one\n", "two �\n"]
    os.write(writing, b"ee")
    os.close(writing)
    assert list(lines) == ["three"]
    os.close(reading)


def test_the_line_of_a_pipe_that_does_not_come() -> None:
    reading, writing = os.pipe()
    with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s"):
        next(process.lines_of(reading, 0.05))
    os.close(writing)
    os.close(reading)
