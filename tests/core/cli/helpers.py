"""Runs the command line in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from attnloom.core.cli.app import main

DATA = Path(__file__).parents[2] / "data" / "traces"


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, read as JSON."""
        return json.loads(self.out)


def attnloom(*arguments: object) -> Ran:
    """Run ``attnloom`` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    words = ["attnloom", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict("os.environ", {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
    return Ran(status, out.getvalue(), err.getvalue())
