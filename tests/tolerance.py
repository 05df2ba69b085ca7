"""How far a float32-accumulating kernel may be from the oracle, derived from the arithmetic and not from what passes.

u is the unit roundoff: 2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16.

Logits. A dot product of D terms whose absolute sum is S errs by about sqrt(D) u32 S (rounding errors of independent
sign); exp and the hooks add a few roundings of the logit's size. exp turns an absolute error of the logit into a
relative error of the weight. Weights enter numerator and denominator, hence the factor two.
Sums over L keys add about sqrt(L) u32. In bf16 and f16 products of two inputs are exact in float32, so these terms are
the same; the weights may be rounded to the input type before P V (u of the type, relative), and so is the result.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.oracle import Answer, Array

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
_SAFETY = 4.0


def _relative_logit_error(head_dim: int) -> float:
    """Error of a logit relative to 1 + its size."""
    return float(_SAFETY * UNIT[torch.float32] * (np.sqrt(head_dim) + 4.0))


def out_error(
    answer: Answer, head_dim: int, dtype: torch.dtype, *, stored: torch.dtype | None = None, slope: float = 1.0
) -> Array:
    """Bound of |out - oracle|, [T, Hq, Dv].

    `stored` is the type of the tensor compared (a state is float32). `slope` other than 1 says that an output hook
    mixes the dimensions of a row and by how much it magnifies an error.
    """
    stored = dtype if stored is None else stored
    keys = np.maximum(answer.visible, 1)[:, None, None]
    relative = _SAFETY * UNIT[torch.float32] * (np.sqrt(keys) + 8.0)
    if dtype != torch.float32:
        relative = relative + 2.0 * UNIT[dtype]
    bound = 2.0 * _relative_logit_error(head_dim) * answer.spread + relative * answer.magnitude
    if slope != 1.0:
        largest = bound.max(axis=-1, keepdims=True) + 8.0 * UNIT[torch.float32] * (1.0 + np.abs(answer.out))
        bound = np.maximum(bound, slope * largest)
    return bound + 1.01 * UNIT[stored] * np.abs(answer.out) + SMALLEST[stored]


def lse_error(answer: Answer, head_dim: int) -> Array:
    """Bound of |lse - oracle| where it is finite, [T, Hq]."""
    keys = np.maximum(answer.visible, 1)[:, None]
    lse = np.where(np.isfinite(answer.lse), np.abs(answer.lse), 0.0)
    logit = _relative_logit_error(head_dim) * (1.0 + answer.logit_size)
    return logit + _SAFETY * UNIT[torch.float32] * (np.sqrt(keys) + 4.0 + lse)


def _compare(name: str, actual: Array, expected: Array, bound: Array) -> None:
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    exact = ~np.isfinite(expected)
    assert np.array_equal(actual[exact], expected[exact]), f"{name}: -inf differs at {np.argwhere(exact)[:4].tolist()}"
    error = np.where(exact, 0.0, np.abs(actual - np.where(exact, 0.0, expected)))
    bad = ~(error <= bound) & ~exact
    if bad.any():
        ratio = np.where(bad, np.nan_to_num(error / bound, nan=np.inf), 0.0)
        where = np.unravel_index(int(ratio.argmax()), bad.shape)
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} elements are off; worst at {tuple(map(int, where))}: "
            f"{actual[where]} instead of {expected[where]}, error {error[where]:.3g} over {bound[where]:.3g}; "
            f"rows {np.unique(np.argwhere(bad)[:, 0])[:8].tolist()}"
        )


def assert_out(out: torch.Tensor, answer: Answer, head_dim: int, dtype: torch.dtype, *, slope: float = 1.0) -> None:
    """Compares a finished output of `dtype` with the oracle's."""
    bound = out_error(answer, head_dim, dtype, stored=out.dtype, slope=slope)
    _compare("out", out.double().numpy(), answer.out, bound)


def assert_lse(lse: torch.Tensor, answer: Answer, head_dim: int) -> None:
    """Compares the natural-log LSE of finished rows; rows without a visible key must hold exactly -inf."""
    assert lse.dtype == torch.float32
    _compare("lse", lse.double().numpy(), answer.lse, lse_error(answer, head_dim))


def assert_state(out: torch.Tensor, lse: torch.Tensor, answer: Answer, head_dim: int, dtype: torch.dtype) -> None:
    """Compares an unfinished state (O float32, LSE float32), before the sink and output_transform."""
    assert out.dtype == torch.float32 and lse.dtype == torch.float32
    bound = out_error(answer, head_dim, dtype, stored=torch.float32)
    _compare("state", out.double().numpy(), answer.state_out, bound)
    _compare("state lse", lse.double().numpy(), answer.state_lse, lse_error(answer, head_dim))
