"""What the batch_invariant mode costs on one CUDA device: its kernels beside the ordinary ones, on rows of gpu/rows.py.

Medians of CUDA-graph replays in turns, the L2 overwritten before each; plans are made before. Both outputs are compared
with float64.
"""

from __future__ import annotations

import sys

import torch
from gpu import card
from gpu.case import Case
from gpu.measure import WORST_ERROR
from gpu.ours import ours
from gpu.rows import ROWS
from gpu.timing import graph_of, median, replay_times
from report import Row, arguments, publish

MEASURED = (
    "decode 64 x 4096 (16)",
    "decode 1 x 131072 (16)",
    "decode 256 x 1024 (16)",
    "decode 64 x 4096, e4m3 KV (16)",
    "verify 64 x 4 drafts, 4096 (16)",
    "append 8 x (512 new + 8192) (16)",
    "prefill 16 x 2048 (16)",
    "prefill 1 x 16384 (16)",
)


def measure(name: str, repeats: int) -> Row:
    """One row: the mode's time, the ordinary kernels' as the peer's."""
    torch.manual_seed(0)
    case = Case.create(ROWS[name])
    runners = {"batch_invariant": ours(case, batch_invariant=True), "ordinary": ours(case)}
    for who, runner in runners.items():
        runner.run()
        error = case.error(runner.out)
        if not error < WORST_ERROR:
            sys.exit(f"{name}: {who}: relative error {error}")
    times = replay_times({who: graph_of(runner.run) for who, runner in runners.items()}, repeats)
    medians = {who: median(each) for who, each in times.items()}
    mode = medians.pop("batch_invariant")
    detail = {
        "error": {who: case.error(runner.out) for who, runner in runners.items()},
        "fastest_us": {who: each[0] for who, each in times.items()},
        "repeats": repeats,
        "tb_per_s": case.shape.kv_bytes / mode / 1e6,
        "tflop_per_s": case.shape.flops / mode / 1e6,
    }
    return Row(name, mode, "us", medians, mode / medians["ordinary"], detail=detail)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", help="the commit measured, where the copy has no history")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("batch_invariant: expected a CUDA device")
    more = {"card": card.name(), "driver": card.driver(), "cuda": torch.version.cuda}
    rows = [measure(name, options.repeats) for name in MEASURED]
    publish("batch_invariant", rows, options.json, more=more, measured=options.commit)


if __name__ == "__main__":
    main()
