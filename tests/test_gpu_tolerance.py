"""The bounds of the tests on a GPU, which the emulated kernels are held to as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from integration_tests.gpu.oracle import Answer
from integration_tests.gpu.tolerance import MANY_ROWS, check_rows

ROWS, DIM, LIMIT = 2 * MANY_ROWS, 64, 1e-2


def answer(sees: bool) -> Answer:
    """Of rows that see keys, or of none that does."""
    rows = torch.full((ROWS, 1), float(sees), dtype=torch.float64)
    return Answer(*(rows.clone() for _ in Answer.__dataclass_fields__))


def check(got: Tensor, expected: Tensor, sees: bool) -> None:
    check_rows("out", got, expected, torch.full((ROWS, 1), LIMIT, dtype=torch.float64), answer(sees))


def test_rows_are_held_to_half_of_their_bounds_as_a_whole() -> None:
    expected = torch.randn(ROWS, 1, DIM, dtype=torch.float64)
    check(expected + 0.4 * LIMIT / DIM**0.5, expected, sees=True)
    with pytest.raises(AssertionError, match="as a whole"):
        check(expected + 0.6 * LIMIT / DIM**0.5, expected, sees=True)


def test_rows_without_keys_are_the_oracles_rounded() -> None:
    """All are one number, as an output hook makes it of zeros, which rounds by most of half a unit."""
    half, unit = torch.tensor(0.376, dtype=torch.float16), 2.0**-12
    expected = torch.full((ROWS, 1, DIM), half.double() + 0.45 * unit, dtype=torch.float64)
    got = expected.half()
    assert torch.equal(got, half.expand_as(got))
    check(got, expected, sees=False)
    got[7, 0, 3] += unit  # within the row's bound
    with pytest.raises(AssertionError, match="1 elements of rows without keys"):
        check(got, expected, sees=False)
    got[7, 0, 3] = torch.nan
    with pytest.raises(AssertionError, match="rows are off"):
        check(got, expected, sees=False)
