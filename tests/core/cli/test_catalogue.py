"""Dtypes by name."""

from __future__ import annotations

import pytest
import torch

from attnloom.core.cli.catalogue import DTYPES, dtype_named


def test_dtypes() -> None:
    for name, dtype in DTYPES.items():
        assert dtype.torch().itemsize == dtype.itemsize
        assert dtype_named(name) is dtype_named(dtype.name) is dtype_named(str(dtype.torch())) is dtype
    assert DTYPES["bf16"].torch() is torch.bfloat16
    with pytest.raises(ValueError, match="dtype 'int8': expected one of bf16, fp16, fp32"):
        dtype_named("int8")
