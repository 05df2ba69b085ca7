"""The sm80 kernels without a GPU: their own text, compiled for the CPU, beside float64.

The stand-ins of include/ are of instructions only; loader, products, softmax, pieces and merges are csrc's. A missing
barrier shows as other bits in another order of the threads. What does not show: a missing memory fence, since all see a
write at once; an order of threads that no meeting separates; registers, banks, and anything that nvcc does. Sums of the
tensor cores are rounded once here. ``EMULATION_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnloom.core.host import host_module
from attnloom.core.kernels import attention_spec
from integration_tests.gpu.kernels import Kernel
from tests.emulation.build import compile_kernel
from tests.emulation.check import KERNELS
from tests.emulation.kernel import TARGET

ROOT = Path(__file__).parents[2]
SECONDS = 6.0
"""Of batches for each kernel; one of each kind in any case."""
PATIENCE = 120.0
"""A kernel that has not ended then never will."""


def _compile(kernel: Kernel, folder: Path) -> Path:
    shape = (kernel.dtype, kernel.head_dim, kernel.head_dim, kernel.case.variant)
    return compile_kernel(attention_spec("sm80", *shape, TARGET, kernel.kv_dtype, kernel.chunk > 0), folder)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    host_module()  # the planner: built once, not by every process
    folders = [tmp_path_factory.mktemp("emulated") for _ in KERNELS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(KERNELS, pool.map(_compile, KERNELS.values(), folders), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_an_emulated_kernel_agrees_with_float64(name: str, libraries: dict[str, Path]) -> None:
    seed = os.environ.get("EMULATION_SEED") or str(random.randrange(10**6))
    command = [sys.executable, "-m", "tests.emulation.check", str(libraries[name]), name, str(SECONDS), seed]
    # The oracle lies where there is a GPU if it can see one.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=PATIENCE)
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else str(late.stdout)
        pytest.fail(f"no end after {PATIENCE:.0f} s, EMULATION_SEED={seed}: {said[-1500:]}")
    last = done.stdout[done.stdout.rfind("\n", 0, -1) + 1 :]
    assert done.returncode == 0, f"EMULATION_SEED={seed}, last batch: {last}\n{done.stderr[-3000:]}"
