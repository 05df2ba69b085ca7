"""``python -m tests.emulation.check LIBRARY KERNEL SECONDS SEED``: batches for an emulated kernel, until time is up.

A process of its own: what a kernel may do wrong, from a read outside of all memory to a loop without end, ends this
process and not the tests. It prints every case before it runs it.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
import time
from pathlib import Path

import torch

from integration_tests.gpu.batch import make_batch
from integration_tests.gpu.cases import Case
from integration_tests.gpu.kernels import BF16, E4M3, F16, Kernel
from integration_tests.gpu.oracle import Answer, Scales, attention
from integration_tests.gpu.storage import bits
from integration_tests.gpu.tolerance import Bounds, bounds, check_lse, check_rows
from tests.emulation.cases import KINDS, draw
from tests.emulation.kernel import EmulatedKernel

KERNELS = {
    str(kernel): kernel
    for kernel in (
        Kernel(BF16, BF16, 64),
        Kernel(F16, E4M3, 128),
        Kernel(F16, F16, 64, "all"),
        Kernel(BF16, BF16, 64, chunk=1),
    )
}


def check(library: Path, kernel: Kernel, case: Case) -> None:
    """Two runs in different orders of the threads: the same bits, and those of the oracle as far as rounding lets them.

    Raises:
        AssertionError: something differs.
    """
    batch = make_batch(kernel, case)
    emulated = EmulatedKernel(library, kernel, case, batch)
    plan = emulated.plan()
    total = case.total_q
    rows, lse = emulated.run(plan, case.seed)
    again, lse_again = emulated.run(plan, case.seed + 1)
    assert torch.equal(bits(rows), bits(again)), "another order of the threads gives other bits"
    if lse is not None and lse_again is not None:
        assert torch.equal(bits(lse), bits(lse_again)), "another order of the threads gives other bits in LSEs"

    scale = kernel.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    scales = Scales(scale, case.k_scale, case.v_scale)
    hooks = kernel.case.hooks(batch.shape, batch.params)
    answers = [attention(r, one, (case.left, case.right), hooks, scales) for r, one in enumerate(batch.requests)]
    answer = Answer.joined(answers)
    limit = Bounds.joined([bounds(one, hooks, kernel.dtype) for one in answers])
    if case.mode == "state":
        check_rows("state", rows[:total], answer.state, limit.state, answer)
        if lse is not None:
            check_lse("state's lse", lse[:total], answer.state_lse, limit.lse)
        rows, lse = emulated.finish(plan, rows, lse)
    check_rows("out", rows[:total], answer.out, limit.out, answer)
    if lse is not None:
        check_lse("lse", lse[:total], answer.lse, limit.lse)


def main(library: str, name: str, seconds: str, seed: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    kernel = KERNELS[name]
    stop = time.monotonic() + float(seconds)
    for number in itertools.count(int(seed)):
        for kind in KINDS:
            if number > int(seed) and time.monotonic() > stop:
                return
            case = draw(kernel, kind, number)
            print(f"{kind}, seed {number}: {case}", flush=True)
            check(Path(library), kernel, case)


if __name__ == "__main__":
    main(*sys.argv[1:])
