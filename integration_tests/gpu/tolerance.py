"""How far a kernel that multiplies 16-bit numbers may be from float64, from its arithmetic and not from what passes.

Products are exact in float32 and summed there; weights are rounded to 16 bits before they meet V (relative, u each),
and so is the output. Rows of hooks (rotated queries and keys, transformed values) are rounded to 16 bits as well.
Roundings are independent, so a row's error is compared by its norm over the dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from integration_tests.gpu.oracle import Answer, Hooks

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
FLOAT32 = 4e-6
"""Error of a logit relative to 1 + its size, and of float32 sums."""
MANY_ROWS = 200
"""From here on the batch's error as a whole is compared too, at half of what single rows may have: a typical row has a
third of its bound. Rows whose bounds are next to nothing do not count. Nor do those that see no key, for what an output
hook makes of zeros may be one number, over and over, which is rounded once and not independently: each element of such
a row is the oracle's, rounded."""


@dataclass(frozen=True)
class Bounds:
    """Of the error's norm over a row [n, Hq], and of LSEs [n, Hq]."""

    out: Tensor
    state: Tensor
    lse: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Bounds]) -> Bounds:
        """Of requests whose rows lie one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


def bounds(answer: Answer, hooks: Hooks, dtype: torch.dtype) -> Bounds:
    """What an answer of a kernel over `dtype` may be off by."""
    u = UNIT[dtype]
    rotated = 6.0 * u * answer.spread if hooks.query is not None or hooks.key is not None else 0.0
    logit = hooks.logits_slope * (rotated + FLOAT32 * (1.0 + answer.size))
    roundings = 1.0 if hooks.value is None else 2.0
    summed = 1.5 * roundings * u * answer.rounded + logit * answer.leverage + FLOAT32 * answer.magnitude
    written = u * answer.out.norm(dim=2) + SMALLEST[dtype] * answer.out.shape[2]
    if hooks.output is not None:
        written = written + FLOAT32  # what it adds may cancel
    state = summed + FLOAT32 * answer.state.norm(dim=2)
    out = hooks.output_slope * summed + written
    finite = answer.lse.nan_to_num(posinf=0.0, neginf=0.0)
    return Bounds(out, state, logit + 2e-5 * (1.0 + finite.abs() + answer.size))


def check_rows(name: str, got: Tensor, expected: Tensor, bound: Tensor, answer: Answer) -> None:
    """Rows `[n, heads, dim]` are within their bounds; where the bound is 0 they are equal."""
    error = (got.double() - expected).norm(dim=2)
    _within(name, error, bound)
    sees = answer.magnitude > 0
    alone, wanted = got[~sees], expected[~sees]
    low, high = ((wanted + off).to(got.dtype) for off in (-FLOAT32, FLOAT32))
    wrong = int((~((low <= alone) & (alone <= high))).sum())
    assert wrong == 0, f"{name}: {wrong} elements of rows without keys are not the oracle's, rounded"
    error, bound = error[sees], bound[sees]
    square = bound.square()
    if bool(square.sum().square() >= MANY_ROWS * square.square().sum()):
        total, allowed = float(error.norm()), 0.5 * float(bound.norm())
        assert total <= allowed, f"{name}: error {total:.3g} as a whole, over {allowed:.3g}"


def check_lse(name: str, got: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Rows without a key are exactly -inf, others close."""
    empty = expected.isinf()
    assert torch.equal(got.isinf() & (got < 0), empty), f"{name}: other rows than expected are -inf"
    _within(name, torch.where(empty, 0.0, got.double() - expected).abs(), bound)


def _within(name: str, error: Tensor, bound: Tensor) -> None:
    bad = ~(error <= bound)
    if not bool(bad.any()):
        return
    ratio = torch.where(bad, (error / bound).nan_to_num(nan=torch.inf), 0.0)
    row, head = divmod(int(ratio.argmax()), bad.shape[1])
    rows = bad.any(1).nonzero()[:8, 0].tolist()
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {bad.numel()} rows are off, worst is query {row}, head {head}: error "
        f"{float(error[row, head]):.3g} over {float(bound[row, head]):.3g}; queries {rows}"
    )
