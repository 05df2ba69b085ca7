"""attnloom's version."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = sys.modules["attnloom"]  # loaded, since this module is in it; core imports none of the public names


def version() -> str:
    """Of the attnloom that runs."""
    return str(_PACKAGE.__version__)


def location() -> Path:
    """Its folder."""
    return Path(str(_PACKAGE.__file__)).parent
