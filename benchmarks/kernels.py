"""attnloom's kernels beside FlashInfer's and vLLM's on the batches of gpu/rows.py, on one CUDA device.

Medians of CUDA-graph replays, one of each in turn, the L2 overwritten between them, on the same tensors; outputs after
the last replay are compared with float64. Plans are made before. Rows are written as they finish, and a later run with
the same commit and card measures only what is missing; --plot draws the file, on any machine.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import torch
from gpu import card, ceilings
from gpu.measure import Failed, measure, row_of
from gpu.peers import CORE, DISTRIBUTIONS, PEERS, missing
from gpu.plot import draw
from gpu.results import Results, page_size_rows
from gpu.rows import LEFT_OUT, ROWS
from gpu.timing import median
from report import ROOT, arguments, commit, table

METHOD = (
    "median of CUDA-graph replays in turns, L2 overwritten before each; plans outside; pages in random order; "
    "lengths of Zipf and mixed rows in a fixed shuffled order"
)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--core", action="store_true", help=f"of the peers only {', '.join(CORE)}")
    parser.add_argument("--peers", default="", help=f"of the peers only these, by comma: {', '.join(PEERS)}")
    parser.add_argument("--peers-only", action="store_true", help="time the peers without ours, and write nothing")
    parser.add_argument("--rows", type=re.compile, default="", help="only rows in whose name this expression is found")
    parser.add_argument("--again", action="store_true", help="measure finished rows anew")
    parser.add_argument("--jit", action="store_true", help="let FlashInfer compile what was not built ahead")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", help="the commit measured, where the copy has no history")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw the result file there")
    options = parser.parse_args()
    options.peers = tuple(filter(None, options.peers.split(","))) or (CORE if options.core else tuple(PEERS))
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))}: expected some of {', '.join(PEERS)}")
    return options


def run(options: argparse.Namespace, results: Results) -> int:
    """Measure what is missing; the number of rows on which ours failed."""
    absent = missing(options.peers)
    limits, no_ceiling = ceilings.measure(options.repeats)
    results.more |= {
        "driver": card.driver(),
        "cuda": torch.version.cuda,
        "method": METHOD,
        "ceilings": limits.as_json(),
        "ceilings_missing": no_ceiling,
        "peers_missing": absent,
        "rows_left_out": list(LEFT_OUT),
    }
    print("ceilings:", limits.as_json(), no_ceiling or "")
    for peer, reason in absent.items():
        print(f"missing: {peer}: {reason}")
    failed = 0
    for name, shape in ROWS.items():
        peers = [peer for peer in shape.peers if peer in options.peers]
        if not re.search(options.rows, name) or (results.finished(name, peers) and not options.again):
            continue
        try:
            found = measure(name, peers, absent, options.repeats, not options.peers_only)
        except Failed as error:
            failed += 1
            print(f"ours failed on {error}", flush=True)
            continue
        shown = "  ".join(f"{who} {median(each):.1f}" for who, each in found.times.items())
        errors = "  ".join(f"{who} {error:.2e}" for who, error in found.errors.items())
        read = f"; a plain read {median(found.read):.1f}" if found.read else ""
        print(f"{name}: {shown} us{read}; error {errors}", found.absent or "", flush=True)
        if not options.peers_only:
            results.add(row_of(name, found, limits))
    return failed


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        if options.plot and options.json and options.json.exists():
            draw(options.json, options.plot)
            return 0
        sys.exit("kernels: expected a CUDA device, or --plot with the --json of an earlier run")
    if not options.jit:
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    here = card.name()
    file = options.json or ROOT / "benchmarks" / "results" / card.folder(here) / "kernels.json"
    results = Results(
        None if options.peers_only else file, options.commit or commit() or "unknown", here, DISTRIBUTIONS
    )
    if results.resume():
        print(f"going on with {len(results.rows)} rows of {file}")
    failed = run(options, results)
    if results.rows:
        rows = list(results.rows.values())
        print(table([*rows, *page_size_rows(rows)]))
        results.write()
    print("left out, for they need compositions:", "; ".join(LEFT_OUT))
    if options.plot and results.file is not None and results.rows:
        draw(results.file, options.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
