"""The bounds of the tests on a GPU, which the emulated kernels are held to as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from integration_tests.gpu.oracle import Answer
from integration_tests.gpu.tolerance import MANY_ROWS, check_rows

ROWS, DIM = 2 * MANY_ROWS, 64


def answer(sees: bool) -> Answer:
    """Of rows that see keys, or of none that does."""
    rows = torch.full((ROWS, 1), float(sees), dtype=torch.float64)
    return Answer(*(rows.clone() for _ in Answer.__dataclass_fields__))


def rounded(expected: Tensor, part: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows off by a part of their bounds: expected, what is got, bounds."""
    bound = torch.full((ROWS, 1), 1e-3, dtype=torch.float64)
    return expected, expected + part * 1e-3 / DIM**0.5, bound


def test_rows_are_held_to_half_of_their_bounds_as_a_whole() -> None:
    expected, got, bound = rounded(torch.randn(ROWS, 1, DIM, dtype=torch.float64), 0.4)
    check_rows("out", got, expected, bound, answer(sees=True))
    expected, got, bound = rounded(torch.randn(ROWS, 1, DIM, dtype=torch.float64), 0.6)
    with pytest.raises(AssertionError, match="as a whole"):
        check_rows("out", got, expected, bound, answer(sees=True))


def test_rows_without_keys_are_judged_one_by_one() -> None:
    """An output hook made one number of all of them, which rounds by most of its bound."""
    expected, got, bound = rounded(torch.full((ROWS, 1, DIM), -0.376, dtype=torch.float64), 0.9)
    check_rows("out", got, expected, bound, answer(sees=False))
    expected, got, bound = rounded(expected, 1.1)
    with pytest.raises(AssertionError, match="rows are off"):
        check_rows("out", got, expected, bound, answer(sees=False))
