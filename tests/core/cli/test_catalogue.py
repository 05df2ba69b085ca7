"""Variants and dtypes by name."""

from __future__ import annotations

import pytest
import torch

from attnloom.core import variants
from attnloom.core.cli.catalogue import DTYPES, catalogue, dtype_named, parse_variant


def test_the_catalogue_is_the_modules_own() -> None:
    found = catalogue()
    assert {"causal", "full", "sliding_window", "soft_cap", "alibi", "sinks", "packed_mask"} <= set(found)
    assert found["soft_cap"] is variants.SoftCap
    assert "check_positive" not in found and "variant" not in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("causal", variants.Causal()),
        (" soft_cap ", variants.SoftCap()),
        ("ALiBi", variants.ALiBi()),
        ("SlidingWindow(4096)", variants.SlidingWindow(4096)),
        ("sliding_window(window=8, symmetric=True)", variants.SlidingWindow(8, symmetric=True)),
        ("causal & soft_cap & sinks", variants.Causal() & variants.SoftCap() & variants.Sinks()),
    ],
)
def test_variants_are_read(text: str, expected: object) -> None:
    assert parse_variant(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected names joined by &"),
        ("no_such", "no 'no_such' in the catalogue, which has alibi, causal"),
        ("causal | full", "expected names of the catalogue joined by &"),
        ("sliding_window", r"expected sliding_window\(window: 'int'"),
        ("sliding_window(print())", r"argument 'print\(\)': expected a literal"),
        ("sliding_window(0)", "window=0"),
        ("variants.Causal()", "expected names of the catalogue joined by &"),
        ("__import__('os').system('true')", "expected names of the catalogue joined by &"),
        ("sinks & sinks", "both have a sink"),
    ],
)
def test_what_is_no_variant(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variant(text)


def test_dtypes() -> None:
    for name, dtype in DTYPES.items():
        assert dtype.torch().itemsize == dtype.itemsize
        assert dtype_named(name) is dtype_named(dtype.name) is dtype_named(str(dtype.torch())) is dtype
    assert DTYPES["bf16"].torch() is torch.bfloat16
    with pytest.raises(ValueError, match="dtype 'int8': expected one of bf16, fp16, fp32"):
        dtype_named("int8")
