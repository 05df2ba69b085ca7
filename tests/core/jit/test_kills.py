"""A build that is killed at any line of ours, or while a compiler or the linker runs, leaves a cache that works."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest

from attnloom.core.jit import build
from tests.core.jit.helpers import CountingCompiler, environment, run, spec, start
from tests.core.jit.test_races import hidden, wait_for

# Forks a builder per line: the tracer kills it when it comes to that line for the first time. Then another builds.
SWEEP = """
import signal, traceback
from pathlib import Path
from attnloom.core.jit import build as _, cache, lock, ninja
files = {module.__file__: module for module in (sys.modules["attnloom.core.jit.build"], cache, lock, ninja)}

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]

def builder(cache_dir, kill_at):
    os.environ["ATTNLOOM_CACHE_DIR"] = str(cache_dir)
    seen = []
    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        here = (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name, frame.f_lineno)
        if event == "line" and here not in seen:
            seen.append(here)
            if len(seen) - 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    try:
        build([spec()])
    finally:
        sys.settrace(None)
    Path(os.environ["SEEN"]).write_text(json.dumps(seen))

def survivor(cache_dir):
    os.environ["ATTNLOOM_CACHE_DIR"] = str(cache_dir)
    assert load(spec()).answer() == 42
    cache.Cache(cache_dir).prepare()  # as the next build does: it clears what dead ones left
    left = [path.name for path in cache_dir.glob(".*")]
    assert not left, left
    (library,) = cache_dir.glob("probe-*/module.so")

caches = Path(os.environ["CACHES"])
assert forked(lambda: builder(caches / "whole", -1)) == 0
seen = json.loads(Path(os.environ["SEEN"]).read_text())
for stop, place in enumerate(seen):
    killed = forked(lambda: builder(caches / str(stop), stop))
    assert killed == signal.SIGKILL, (place, killed)
    assert forked(lambda: survivor(caches / str(stop))) == 0, place
print(json.dumps(seen))
"""


def session(leader: int) -> list[int]:
    """The processes of a session: all that its leader started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(file.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(file.parent.name))
        except OSError:
            continue  # ended meanwhile
    return found


def quick_compiler(folder: Path, library: Path) -> Path:
    """A compiler that only ever makes ``library``: it takes no time, so that we can be killed many times."""
    real = CountingCompiler.find()
    path = folder / "quick-c++"
    path.write_text(
        f'#!/bin/sh\nfor last; do :; done\ncase " $* " in *" -c "*) echo object > "$last";; '
        f'*" -shared "*) cp {library} "$last";; *) exec {real} "$@";; esac\n'
    )
    path.chmod(stat.S_IRWXU)
    return path


def test_killed_at_any_line(tmp_path: Path, cache: Path) -> None:
    (built,) = build([spec()])
    library = shutil.copy(built, tmp_path / "library.so")
    compiler = quick_compiler(tmp_path, Path(library))
    env = environment(tmp_path / "none", CXX=str(compiler), SEEN=str(tmp_path / "seen.json"), CACHES=str(tmp_path))
    places = json.loads(run(SWEEP, env))
    functions = {function for _, function, _ in places}
    assert {"prepare", "acquire", "private_folder", "_write_sources", "run_ninja", "publish", "release"} <= functions
    assert len(places) > 80


@pytest.mark.parametrize("stage", ["-c", "-shared"])
def test_killed_with_its_compilers(tmp_path: Path, stage: str) -> None:
    """As a machine that loses power, or a container that is ended: everything stops in the middle of a file."""
    cache = tmp_path / "cache"
    marker = tmp_path / "begun"
    compiler = CountingCompiler(tmp_path / "compiler")
    half = (
        f'for last; do :; done; case " $* " in *" {stage} "*) echo half > "$last"; touch {marker}; sleep 300;; esac\n'
    )
    script = compiler.path.read_text()
    compiler.path.write_text(script.replace("#!/bin/sh\n", f"#!/bin/sh\n{half}"))
    victim = start("os.setsid(); load(spec())", environment(cache, CXX=str(compiler.path)))
    wait_for(marker.exists, f"the compiler to be called with {stage}")
    for pid in session(victim.pid):
        os.kill(pid, signal.SIGKILL)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert not list(cache.glob("probe-*")) and hidden(cache)
    compiler.path.write_text(script)
    assert run("print(load(spec()).answer())", environment(cache, CXX=str(compiler.path))) == "42"
    assert hidden(cache) == []
