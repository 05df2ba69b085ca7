"""A small set of the random batches, for tools that watch every access of a kernel: compute-sanitizer.

    compute-sanitizer --tool racecheck python -m integration_tests.gpu.small

Every kind of tile, loader, hook and merge is in it: caches of 16 and of 8 bits, narrow and wide heads, heads that are
no power of two, states, splits among few and many workers, positions, packed and block masks, and the batch_invariant
mode.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

from integration_tests.gpu.cases import draw
from integration_tests.gpu.kernels import BF16, E4M3, E5M2, F16, INVARIANT, Kernel
from integration_tests.gpu.running import check_case

SMALL = (
    Kernel(BF16, BF16, 128),
    Kernel(F16, E5M2, 80),
    Kernel(BF16, BF16, 256),
    Kernel(BF16, E4M3, 128),
    Kernel(BF16, BF16, 128, "all"),
    Kernel(BF16, E5M2, 192, "all, no softmax"),
    Kernel(BF16, E4M3, 128, "rope"),
    Kernel(BF16, BF16, 128, "packed mask"),
    Kernel(BF16, BF16, 128, "local and first"),
    Kernel(BF16, BF16, 128, "chunks"),
    *(kernel for kernel in INVARIANT if kernel.name in ("plain", "all, of positions")),
)
_LONGEST = 300  # keys; queries a third of it


def run(each: int, seconds: float) -> None:
    """The first batches of each kernel, cut short, one of each in turn until the time is over."""
    end = time.monotonic() + seconds
    done = 0
    for index in range(each):
        for kernel in SMALL:
            case = draw(kernel, index)
            if case.trees is None:
                kv_lens = [min(length, _LONGEST) for length in case.kv_lens]
                qo_lens = [min(queries, _LONGEST // 3) for queries in case.qo_lens]
                case = dataclasses.replace(case, kv_lens=kv_lens, qo_lens=qo_lens, planned=kv_lens)
            check_case(kernel, case)
            done += 1
            if time.monotonic() > end:
                print(f"{done} batches are right; the time is over")
                return
    print(f"{done} batches of {len(SMALL)} kernels are right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=3, help="batches of each kernel")
    parser.add_argument("--seconds", type=float, default=40.0, help="begin no further batch after this time")
    arguments = parser.parse_args()
    run(arguments.each, arguments.seconds)
