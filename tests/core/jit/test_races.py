"""Many builders at once, and builders that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attnloom.core.jit import build
from attnloom.core.jit.cache import Cache
from attnloom.core.jit.lock import acquire
from tests.core.jit.helpers import CountingCompiler, environment, finish, run, spec, start


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited a minute for {what}"
        time.sleep(0.01)


def hidden(cache: Path) -> list[str]:
    return [path.name for path in cache.glob(".*")]


def test_eight_processes_on_a_cold_cache_build_once(tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "slow", before="sleep 0.5")
    env = environment(tmp_path / "cache", CXX=str(compiler.path))
    gate = tmp_path / "go"
    ready = [tmp_path / f"ready{index}" for index in range(8)]
    code = """
open(os.environ["READY"], "w").close()
while not os.path.exists(os.environ["GATE"]): time.sleep(0.002)
print(load(spec()).answer(), build([spec()])[0])
"""
    processes = [start(code, env | {"READY": str(path), "GATE": str(gate)}) for path in ready]
    wait_for(lambda: all(path.exists() for path in ready), "eight processes to start")
    gate.touch()
    printed = {finish(process) for process in processes}
    (library,) = (tmp_path / "cache").glob("probe-*/module.so")
    assert printed == {f"42 {library}"}
    assert compiler.count == 1
    assert hidden(tmp_path / "cache") == []


def test_overlapping_lists_build_each_module_once(tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "slow", before="sleep 0.2")
    env = environment(tmp_path / "cache", CXX=str(compiler.path))
    lists = ["abc", "cd", "dcba", "bd"]
    code = "print(len(build([spec(name, 1) for name in os.environ['NAMES']])))"
    processes = [start(code, env | {"NAMES": names}) for names in lists]
    assert [finish(process) for process in processes] == [str(len(names)) for names in lists]
    assert compiler.count == 4


def test_threads_build_once(cache: Path, tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "slow", before="sleep 0.2")
    code = """
import threading
results = []
threads = [threading.Thread(target=lambda: results.append(load(spec()))) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(results), len(set(map(id, results))))
"""
    assert run(code, environment(cache, CXX=str(compiler.path))) == "4 1"
    assert compiler.count == 1


def test_a_finished_module_is_published_while_another_still_compiles(tmp_path: Path) -> None:
    gate = tmp_path / "go"
    hold = f'case "$*" in *slow*) while [ ! -e {gate} ]; do sleep 0.02; done;; esac'
    compiler = CountingCompiler(tmp_path / "compiler", before=hold)
    env = environment(tmp_path / "cache", CXX=str(compiler.path))
    # Two jobs whatever this machine has, so that the slow one does not come first alone.
    code = "from attnloom.core.jit import ninja; ninja.job_limit = lambda: 2; build([spec('slow'), spec('quick')])"
    builder = start(code, env)
    try:
        wait_for(lambda: list((tmp_path / "cache").glob("quick-*/module.so")), "the quick module")
        assert run("print(load(spec('quick')).answer())", env) == "42"
        assert not list((tmp_path / "cache").glob("slow-*"))
    finally:
        gate.touch()
    finish(builder)
    assert list((tmp_path / "cache").glob("slow-*/module.so"))
    assert compiler.count == 2


def test_a_killed_build_leaves_a_usable_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    gate = tmp_path / "go"
    slow = CountingCompiler(tmp_path / "slow", before=f"while [ ! -e {gate} ]; do sleep 0.02; done")
    victim = start("load(spec())", environment(cache, CXX=str(slow.path)))
    try:
        wait_for(lambda: slow.count, "the compiler to start")
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    finally:
        left = hidden(cache)
        gate.touch()
    assert victim.returncode == -signal.SIGKILL
    assert any(name.startswith(".build-") for name in left)
    assert not list(cache.glob("probe-*")), "nothing is published but whole modules"

    quick = CountingCompiler(tmp_path / "quick")
    env = environment(cache, CXX=str(quick.path))
    assert run("print(load(spec()).answer())", env) == "42"
    assert quick.count == 1
    assert hidden(cache) == [], "what the killed build left is gone"


def test_who_waits_for_a_killed_builder_takes_over(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    marker = tmp_path / "first"
    gate = tmp_path / "go"
    # Only the first compiler hangs.
    hold = f"if mkdir {marker} 2>/dev/null; then while [ ! -e {gate} ]; do sleep 0.02; done; fi"
    compiler = CountingCompiler(tmp_path / "compiler", before=hold)
    env = environment(cache, CXX=str(compiler.path))
    victim = start("load(spec())", env)
    try:
        wait_for(marker.exists, "the first compiler")
        waiting = start("print('waiting', flush=True); print(load(spec()).answer())", env)
        assert waiting.stdout is not None and waiting.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        assert waiting.poll() is None and compiler.count == 1
        os.kill(victim.pid, signal.SIGKILL)
        assert finish(waiting) == "42"
        assert compiler.count == 2
    finally:
        gate.touch()
        victim.kill()
        victim.communicate()


def test_a_living_build_is_not_cleared(cache: Path) -> None:
    there = Cache(cache)
    there.prepare()
    with there.private_folder() as mine:
        build([spec()])  # clears what dead builds left
        assert mine.is_dir()
    assert not mine.exists()


def test_a_lock_is_exclusive_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = acquire(path)
    assert first is not None
    assert acquire(path, wait=False) is None
    order: list[str] = []

    def second() -> None:
        lock = acquire(path)
        order.append("second")
        assert lock is not None
        lock.release()

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.1)
    order.append("first")
    first.release()
    thread.join(timeout=10)
    assert order == ["first", "second"]
    assert not path.exists()


def test_a_lock_admits_one_at_a_time(tmp_path: Path) -> None:
    """Its file comes and goes, so a waiter may get a lock on one that is no longer there: that one guards nothing."""
    inside: list[int] = []
    crowds: list[int] = []

    def enter(thread: int) -> None:
        for _ in range(50):
            lock = acquire(tmp_path / "lock")
            assert lock is not None
            inside.append(thread)
            time.sleep(0.0002)
            crowds.append(len(inside))
            inside.remove(thread)
            lock.release()

    threads = [threading.Thread(target=enter, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert crowds == [1] * 300
