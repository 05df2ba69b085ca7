"""Where the tests on a GPU keep their models."""

from __future__ import annotations

import os
from pathlib import Path

from integration_tests.models import tiny

FOLDER = Path(os.environ.get("ATTNLOOM_TEST_MODELS", "/tmp/attnloom-models"))


def folder_of(model: str) -> str:
    """A tiny model's, built if need be; or the folder itself."""
    return str(tiny.build(model, FOLDER)) if model in tiny.MODELS else model
