"""The file of a run: every row is in it as soon as it is measured, and a later run at the same place goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from report import Row, Target

from gpu.rows import PAGE_SIZES, ROWS


def row_from_json(data: Mapping[str, Any]) -> Row:
    """A row as it was written; its target is this checkout's."""
    name = data["row"]
    return Row(
        name, data["ours_us"], "us", data["peers_us"], data["ratio"], Target("ratio", ROWS[name].target), data["detail"]
    )


def page_size_rows(rows: Iterable[Row]) -> list[Row]:
    """Our time on one page size over our time on another, where both rows are there."""
    ours = {row.row: row.ours for row in rows}
    return [
        Row(name, ours[first] / ours[second], "x", target=Target("ours", limit))
        for name, (first, second, limit) in PAGE_SIZES.items()
        if first in ours and second in ours
    ]


@dataclass
class Results:
    """Rows of one commit on one card.

    Attributes:
        file: where they are kept; None: nowhere.
        commit, card: whose they are. A file of others is begun anew.
        distributions: whose versions are written.
        more: further top-level fields.
        rows: by name, in the order of ``ROWS``.
    """

    file: Path | None
    commit: str
    card: str
    distributions: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def resume(self) -> bool:
        """Take over the rows of the file, if it is of this commit and card."""
        if self.file is None or not self.file.exists():
            return False
        found = json.loads(self.file.read_text())
        if (found["commit"], found["card"]) != (self.commit, self.card):
            return False
        self.rows = {data["row"]: row_from_json(data) for data in found["rows"] if data["row"] in ROWS}
        return bool(self.rows)

    def finished(self, name: str, peers: Iterable[str]) -> bool:
        """Whether the row is there, and each of the peers was measured in it or could not be."""
        if name not in self.rows:
            return False
        row = self.rows[name]
        return all(peer in row.peers or peer in row.detail["peers_absent"] for peer in peers)

    def add(self, row: Row) -> None:
        """Keep a row, and write the file."""
        self.rows[row.row] = row
        self.rows = {name: self.rows[name] for name in ROWS if name in self.rows}
        self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        if self.file is not None:
            rows = list(self.rows.values())
            more = {"card": self.card, **self.more, "page_sizes": [row.as_json() for row in page_size_rows(rows)]}
            result = report.document("kernels", rows, peers=self.distributions, more=more, measured=self.commit)
            report.write(self.file, result)
