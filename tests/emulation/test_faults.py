"""The emulation says what is wrong with a kernel: one with a fault each, in a process of its own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.build import HERE, compile_text

THREADS, TURN = 128, 37
# As faults.cpp counts them, with what is said. No word: the result differs.
FAULTS = {
    "none": None,
    "deadlock": "deadlock",
    "other instruction": "others of its warp came to",
    "outside of the tensors": "outside of the tensors",
    "not aligned": "not aligned",
    "too far in shared memory": "outside of 1024 bytes of shared memory",
    "behind its shared memory": "byte 1024 of 1024 of shared memory was written",
    "no wait": None,
    "no barrier": None,
}
RIGHT = [(thread + TURN) % THREADS for thread in range(THREADS)]


def run(library: str, fault: int) -> list[int]:
    """What the kernel gives: each thread the word that its neighbour has copied."""
    module = ctypes.CDLL(library)
    words, out = (ctypes.c_int32 * THREADS)(*range(THREADS)), (ctypes.c_int32 * THREADS)()
    module.emulation_seed(ctypes.c_uint32(1))
    module.emulation_readable(words, ctypes.c_int64(ctypes.sizeof(words)))
    module.run_faulty(ctypes.c_int32(fault), words, out)
    return list(out)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_text("faults", (HERE / "faults.cpp").read_text(), tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, library: Path) -> None:
    index, message = list(FAULTS).index(fault), FAULTS[fault]
    if message is None:
        assert (run(str(library), index) == RIGHT) == (fault == "none")
        return
    code = f"from tests.emulation.test_faults import run; run({str(library)!r}, {index})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1], timeout=60)
    assert done.returncode == 3 and message in done.stderr, done.stderr


@pytest.mark.parametrize("at", [6, 7])
def test_nobody_reads_behind_guarded_memory(at: int) -> None:
    code = f"""
import ctypes, math
from tests.emulation.guarded import Guarded
memory = Guarded(7, math.nan)
assert bool(memory.floats.isnan().all())
print(ctypes.c_float.from_address(memory.floats.data_ptr() + 4 * {at}).value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1], timeout=60)
    assert (done.returncode, done.stdout) == ((0, "nan\n") if at == 6 else (-11, ""))
