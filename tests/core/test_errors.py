"""Errors keep their fields on the way from one process to another."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from attnloom.core import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.CompilerNotFound("m"),
        errors.CompileFailed("m", command="c", diagnostic="d", log=Path("/l")),
        errors.CompileTimedOut("m", command="c", diagnostic="d", log=Path("/l")),
        errors.CacheUnusable("m", folder=Path("/f")),
        errors.JitDisabled("m", module="n", key="k"),
        errors.LoadFailed("m", file=Path("/f")),
        errors.BundleRefused("m"),
    ],
)
def test_pickle_keeps_the_fields(error: errors.JitError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == "m"
    assert vars(back) == vars(error)
    assert isinstance(error, RuntimeError) and isinstance(error, errors.AttnloomError)
