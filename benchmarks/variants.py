"""Variants: against torch's flex_attention on a CPU, by visible tiles, their build, and the lines that users write.

    python benchmarks/variants.py [--rows REGEX] [--threads 1 2] [--quick] [--json FILE]

flex_attention is compiled for CPU (inference, GQA by enable_gqa, a BlockMask wherever there is a mask). Outputs are
compared with each other and with float64 before anything is timed; then both take turns. Each number of threads is a
process of its own, one CPU a thread. On one thread the ratio is of CPU time, which others on the machine hardly move;
on two it is of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import Row, Target, arguments, machine, publish
from variant.builds import builds, identities, traced_build
from variant.lines import example_lines
from variant.process import in_child


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it finds, e.g. 'ALiBi.*bf16'")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="5 pairs a row instead of at least 11")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, re.compile(options.rows), 5 if options.quick else 11)
        return
    cpus = sorted(os.sched_getaffinity(0))
    rows: list[Row] = []
    processes = []
    wanted = re.compile(options.rows)
    for threads in options.threads:
        if threads > len(cpus):
            print(f"{threads} threads: skipped, this process may use {len(cpus)} CPUs")
            continue
        done = in_child(f"times {threads}", cpus[-threads:], options)
        processes.append(done["process"])
        rows += [Row(**{**row, "target": Target(**row["target"])}) for row in done["rows"]]
    rows += [row for row in (*builds(wanted, options), *identities(wanted), *example_lines(wanted))]
    publish("variants", rows, options.json, peers=["triton"], more={"processes": processes})


def child(work: str, wanted: re.Pattern[str], pairs: int) -> None:
    """In a child: do ``work`` and write what it found."""
    if work.startswith("times"):
        found = machine()  # before OpenMP binds this thread to its own CPU
        import torch
        from variant.times import flex_rows, tile_rows

        threads = torch.get_num_threads()
        print(f"threads {threads}, affinity {found['affinity']}, {found['omp_env']}", flush=True)
        rows = [asdict(row) for row in (*flex_rows(threads, wanted, pairs), *tile_rows(threads, wanted, pairs))]
        result: dict[str, Any] = {"process": {"threads": threads, **found}, "rows": rows}
    else:
        result = traced_build()
    Path(os.environ["ATTNLOOM_BENCHMARK_FILE"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
