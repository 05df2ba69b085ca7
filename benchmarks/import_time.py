"""What importing attnloom costs beyond torch, and what its entry points import.

    python benchmarks/import_time.py [--repeats 9] [--json FILE]

Each sample is a process of its own; the first one, which may write bytecode, is not counted.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tomllib
from typing import Any

from report import ROOT, Row, Target, arguments, publish

TARGET = Target("ours", 100, "ms")

# The child prints what `body` took and whether torch is there afterwards.
CHILD = """
import json, sys, time
{before}
begin, cpu_begin = time.perf_counter(), time.process_time()
{body}
took, cpu = (time.perf_counter() - begin) * 1e3, (time.process_time() - cpu_begin) * 1e3
modules = sum(name.partition(".")[0] == "torch" for name in sys.modules)
print(json.dumps({{"ms": took, "cpu_ms": cpu, "torch": modules}}))
"""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    everything = "import attnloom\nfor name in attnloom.__all__:\n    getattr(attnloom, name)"
    rows = [
        time_row("import torch", "", "import torch", options.repeats, None),
        time_row("import attnloom", "", "import attnloom", options.repeats, TARGET),
        time_row("attnloom, every public name, after torch", "import torch", everything, options.repeats, TARGET),
    ]
    for module in entry_modules():
        body = f"import {module}"
        rows.append(time_row(f"entry point {module}", "", body, options.repeats, TARGET))
        count = sample("", body)["torch"]
        rows.append(Row("  torch modules it imports", count, "modules", target=Target("ours", 0)))
    publish("import_time", rows, options.json)


def entry_modules() -> list[str]:
    """The modules that frameworks import to find attnloom."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    places = [place for group in project["entry-points"].values() for place in group.values()]
    return sorted({place.partition(":")[0] for place in places})


def sample(before: str, body: str) -> dict[str, Any]:
    """One sample in a fresh process."""
    program = CHILD.format(before=before, body=body)
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def time_row(name: str, before: str, body: str, repeats: int, target: Target | None) -> Row:
    samples = [sample(before, body) for _ in range(repeats + 1)][1:]
    wall, cpu = ([found[clock] for found in samples] for clock in ("ms", "cpu_ms"))
    detail = {"min_ms": round(min(wall), 2), "cpu_ms": round(statistics.median(cpu), 2), "samples": repeats}
    return Row(name, round(statistics.median(wall), 2), "ms", target=target, detail=detail)


if __name__ == "__main__":
    main()
