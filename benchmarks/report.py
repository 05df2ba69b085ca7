"""What every benchmark shares: the machine it ran on, the rows it found, their table and their file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OMP_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_NUM")


@dataclass(frozen=True)
class Target:
    """A limit from the project's own list: ``of`` (``ratio`` or ``ours``) against ``limit``."""

    of: str
    limit: float
    unit: str = ""
    at_least: bool = False

    def __str__(self) -> str:
        return f"{self.of} {'>=' if self.at_least else '<='} {self.limit:g}{' ' + self.unit if self.unit else ''}"

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        row: what was measured.
        ours: attnloom's figure; ``unit`` names the JSON fields, ``ours_<unit>`` and ``peers_<unit>``.
        peers: the same figure of others, by name.
        ratio: ours over the peer that the target names; above 1 attnloom is slower, or whatever ``unit`` counts.
        target: what it is to reach, if anything.
        detail: whatever else a reader may ask for; JSON values.
    """

    row: str
    ours: float
    unit: str = "us"
    peers: Mapping[str, float] = field(default_factory=dict)
    ratio: float | None = None
    target: Target | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        value = self.ratio if self.target.of == "ratio" else self.ours
        return value is not None and self.target.met(value)

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.row,
            f"ours_{self.unit}": self.ours,
            f"peers_{self.unit}": dict(self.peers),
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "met": self.met,
            "detail": dict(self.detail),
        }


def machine() -> dict[str, Any]:
    """The processor, what this process may use of it, and how busy it is already."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "omp_env": {name: value for name, value in sorted(os.environ.items()) if name.startswith(OMP_PREFIXES)},
        "load_1min": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(*distributions: str) -> dict[str, str | None]:
    """Of Python, attnloom's checkout, torch, and the distributions named; None where one is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in ("torch", *distributions)}}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, marked ``-dirty`` when the engine's own files differ from it; None outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", "core", "csrc", "attnloom") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every program takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser


def table(rows: Sequence[Row]) -> str:
    """The rows, aligned."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    lines = [["row", "ours", *peers, "ratio", "target", ""]]
    for row in rows:
        decimals = 3 if row.unit == "x" else 0 if row.unit in ("bytes", "modules", "lines") else 1
        theirs = [f"{row.peers[name]:,.{decimals}f}" if name in row.peers else "" for name in peers]
        verdict = {None: "", True: "met", False: "MISSED"}[row.met]
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        lines.append([row.row, f"{row.ours:,.{decimals}f} {row.unit}", *theirs, ratio, str(row.target or ""), verdict])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def document(
    name: str,
    rows: Sequence[Row],
    *,
    peers: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    measured: str | None = None,
) -> dict[str, Any]:
    """What is written to a file.

    Args:
        name: of the program.
        rows: what it found.
        peers: distributions whose versions matter.
        more: further top-level fields.
        measured: the commit, where the program runs on a copy without its history.
    """
    return {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": measured or commit(),
        "machine": machine(),
        "versions": versions(*peers),
        **(more or {}),
        "rows": [row.as_json() for row in rows],
    }


def write(file: Path, result: Mapping[str, Any]) -> None:
    """Replace the file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(file)


def publish(
    name: str,
    rows: Sequence[Row],
    file: Path | None,
    *,
    peers: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    measured: str | None = None,
) -> None:
    """Print the table, and write the file if one was asked for; arguments as :func:`document`'s.

    Args:
        file: where the JSON goes; None: nowhere.
    """
    result = document(name, rows, peers=peers, more=more, measured=measured)
    print(table(rows))
    if file is not None:
        write(file, result)
        print(f"written: {file}")
