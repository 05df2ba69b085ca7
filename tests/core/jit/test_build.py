"""From sources to functions that can be called, and what is said when that fails."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import pytest

from attnloom.core.errors import CompileFailed, CompilerNotFound, JitError
from attnloom.core.jit import CSRC, ModuleSpec, Source, build, load, ninja
from attnloom.core.jit.arch import host_arch
from attnloom.core.jit.ninja import job_limit
from tests.core.jit.helpers import CountingCompiler, spec

BROKEN = ModuleSpec("broken", (Source("broken.cpp", "\nint x = no_such_name;\n"),))


def test_load_gives_functions(cache: Path, compiler: CountingCompiler) -> None:
    library = load(spec("load_gives_functions", 7))
    assert isinstance(library, ctypes.CDLL)
    assert library.answer() == 7
    assert load(spec("load_gives_functions", 7)) is library
    assert compiler.count == 1


def test_two_units_a_header_of_ones_own_and_one_of_csrc(cache: Path) -> None:
    module = ModuleSpec(
        "two_units",
        (
            Source(
                "one.cpp", '#include "mine.h"\n#include "common/macros.h"\nATTNLOOM_EXPORT int f() { return g(); }\n'
            ),
            Source("two.cpp", '#include "mine.h"\nint g() { return 5; }\n'),
            Source("mine.h", "int g();\n"),
        ),
    )
    assert load(module).f() == 5
    record = json.loads((build([module])[0].parent / "build.json").read_text())
    assert record["headers"] == ["common/macros.h"]
    assert (CSRC / record["headers"][0]).is_file()


def test_openmp_runs_on_the_threads_of_torch(cache: Path) -> None:
    torch = pytest.importorskip("torch")
    text = (
        '#include <omp.h>\nextern "C" __attribute__((visibility("default"))) int threads() {\n'
        "int n = 0;\n#pragma omp parallel\n#pragma omp single\nn = omp_get_num_threads();\nreturn n; }\n"
    )
    library = load(ModuleSpec("openmp", (Source("openmp.cpp", text),)))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)  # sets it in torch's libgomp; another copy would not hear of it
            assert library.threads() == threads
    finally:
        torch.set_num_threads(before)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1


def test_the_record_says_what_was_run(cache: Path, compiler: CountingCompiler) -> None:
    (library,) = build([spec()])
    record = json.loads((library.parent / "build.json").read_text())
    compile_command, link_command = record["commands"]
    assert compile_command.startswith(f"{compiler.path} -std=c++17 -O3 ")
    assert "-shared" in link_command
    assert record["arch"] == host_arch().name
    assert all(flag in compile_command.split() for flag in host_arch().flags)
    assert library.parent.name == f"probe-{record['key'][:16]}"
    assert str(cache) not in json.dumps(record)


def test_one_ninja_call_for_all_that_is_missing(
    cache: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(*arguments: object) -> tuple[int, str]:
        calls.append(arguments)
        return ninja.run_ninja(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules[build.__module__], "run_ninja", counting)  # its name is hidden by the function
    present = spec("present")
    build([present])
    calls.clear()
    wanted = [spec("one", 1), present, spec("two", 2), spec("one", 1), spec("three", 3)]
    told: list[tuple[int, int, str]] = []
    libraries = build(wanted, progress=lambda *what: told.append(what))
    assert len(calls) == 1
    assert compiler.count == 4
    assert [library.parent.name.partition("-")[0] for library in libraries] == ["one", "present", "two", "one", "three"]
    assert [what[:2] for what in told] == [(1, 3), (2, 3), (3, 3)]
    assert {what[2] for what in told} == {"one", "two", "three"}
    assert build(wanted) == libraries
    assert len(calls) == 1
    assert build([]) == []


def test_a_failed_compile_says_what_was_run_and_why(cache: Path) -> None:
    with pytest.raises(CompileFailed, match="building broken failed") as caught:
        load(BROKEN)
    error = caught.value
    assert "broken.cpp:2:" in error.diagnostic and "no_such_name" in error.diagnostic
    assert "-std=c++17" in error.command and "broken.cpp" in error.command
    assert error.log is not None and "no_such_name" in error.log.read_text()
    assert (error.log.parent / "broken.cpp").read_text() == BROKEN.sources[0].text
    for part in (error.diagnostic, error.command, str(error.log)):
        assert part in str(error)
    assert isinstance(error, JitError) and isinstance(error, RuntimeError)


def test_a_failed_module_does_not_stop_the_others(cache: Path, compiler: CountingCompiler) -> None:
    with pytest.raises(CompileFailed, match="building broken failed"):
        build([spec("first"), BROKEN, spec("last")])
    assert compiler.count == 3
    build([spec("first"), spec("last")])
    assert compiler.count == 3
    assert not list(cache.glob(".*")), "a failed build leaves no lock and no private folder"


def test_a_failed_link(cache: Path) -> None:
    twice = tuple(Source(f"{name}.cpp", "int same() { return 1; }\n") for name in ("a", "b"))
    with pytest.raises(CompileFailed) as caught:
        build([ModuleSpec("twice", twice)])
    assert "multiple definition" in caught.value.diagnostic
    assert "-shared" in caught.value.command


def test_a_compiler_that_dies_without_a_word(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(CountingCompiler(tmp_path / "dying", before="kill -9 $$").path))
    with pytest.raises(CompileFailed) as caught:
        build([spec()])
    assert caught.value.diagnostic and "probe.o" in (caught.value.log or Path()).read_text()
    monkeypatch.delenv("CXX")
    (library,) = build([spec()])
    assert library.is_file()
    assert not list((cache / "failed").iterdir()), "the log of a failure goes when the module is built after all"


def test_no_ninja(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", CountingCompiler.find())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompilerNotFound, match=r"no ninja.*pip install ninja"):
        build([spec()])


def test_folders_with_awkward_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "a b" / "$c: 'd\" #e"))
    compiler = CountingCompiler(tmp_path / "bin")
    odd = tmp_path / "my $tools"
    odd.mkdir()
    compiler.path.rename(odd / "c++ 1")
    monkeypatch.setenv("CXX", f"'{odd / 'c++ 1'}'")
    assert load(spec("awkward", 9)).answer() == 9
    assert compiler.count == 1


@pytest.mark.parametrize(("free", "jobs"), [(0, 1), (3 << 30, 2), (1 << 50, 8)])
def test_jobs_follow_memory_and_cores(monkeypatch: pytest.MonkeyPatch, free: int, jobs: int) -> None:
    monkeypatch.setattr(ninja, "_available_bytes", lambda: free)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert job_limit() == jobs


def test_free_memory_is_read_from_the_machine() -> None:
    assert 1 << 20 < ninja._available_bytes() < 1 << 50
