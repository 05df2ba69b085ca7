"""The benchmarks are programs: their own folder is on the path when they run, and so it is here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
