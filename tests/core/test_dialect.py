"""The functions that hooks may call, against numpy: query i holds x_i, the only key is e_0, the value is 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnloom.core.layout import BlockSparseLayout
from tests.core import kernels
from tests.core.planning import indptr
from tests.core.variant_cases import DIALECT, FUNCTIONS
from tests.oracle import Array

POINTS = torch.cat([torch.linspace(-20, 20, 4001), torch.linspace(-0.01, 0.01, 401), torch.tensor([-80.0, 80.0])])


def evaluate(which: int, x: torch.Tensor) -> torch.Tensor:
    """Function number `which` of the dialect at each x, through the kernel."""
    q = torch.zeros(len(x), 6, 64)
    q[:, :, 0] = x[:, None]
    k = torch.zeros(1, 1, 2, 64)
    k[..., 0] = 1.0
    layout = BlockSparseLayout.from_csr(
        indptr([1]), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1
    )
    engine = kernels.engine_of(DIALECT)
    plan = engine.plan(indptr([len(x)]), layout)
    out = engine.run(plan, q, k, torch.ones(1, 1, 2, 64), sm_scale=1.0, params={"which": which})
    assert (out == out[:, :1, :1]).all()
    return out[:, 0, 0]


def expected(text: str, x: Array) -> Array:
    """The same text as numpy reads it."""
    same = (
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "tanh",
        "sqrt",
        "sin",
        "cos",
        "abs",
        "floor",
        "ceil",
        "trunc",
    )
    names: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in (*same, "minimum", "maximum", "sign")}
    names |= {"min": np.minimum, "max": np.maximum, "pow": np.power, "round": np.rint, "where": np.where}
    names |= {"floor_div": np.floor_divide, "floor_mod": np.mod, "erf": np.vectorize(math.erf)}
    names |= {"sigmoid": lambda v: 1.0 / (1.0 + np.exp(-v)), "float": lambda v: v.astype(np.float64)}
    source = text.replace("0.25f", "0.25").replace("0.5f", "0.5").replace("1.5f", "1.5").replace("2.0f", "2.0")
    with np.errstate(divide="ignore"):
        return np.asarray(eval(source, {"__builtins__": {}}, {**names, "x": x, "q_index": np.arange(len(x))}))


@pytest.mark.parametrize("which", range(len(FUNCTIONS)), ids=FUNCTIONS)
def test_function(which: int) -> None:
    got = evaluate(which, POINTS).double().numpy()
    wanted = expected(FUNCTIONS[which], POINTS.double().numpy())
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    error = np.abs(got - wanted)[finite]
    bound = 8 * 2.0**-24 * (np.abs(wanted) + 2.0**-24)[finite]  # a few units in the last place
    worst = int((error / bound).argmax())
    assert error[worst] <= bound[worst], (
        f"x={float(POINTS[finite][worst])}: {got[finite][worst]}, not {wanted[finite][worst]}"
    )


@pytest.mark.parametrize(
    ("text", "x", "wanted"),
    [
        ("exp(x)", [-float("inf"), -200.0, 0.0, 90.0, float("inf")], [0.0, 0.0, 1.0, float("inf"), float("inf")]),
        ("tanh(x)", [-float("inf"), -50.0, 0.0, 50.0, float("inf")], [-1.0, -1.0, 0.0, 1.0, 1.0]),
        ("sigmoid(x)", [-200.0, 0.0, 200.0], [0.0, 0.5, 1.0]),
        ("exp2(x)", [0.0, -float("inf"), 130.0], [1.0, 0.0, float("inf")]),
    ],
)
def test_limits(text: str, x: list[float], wanted: list[float]) -> None:
    finite = torch.tensor([v if abs(v) < 1e30 else np.copysign(3e38, v) for v in x])
    assert evaluate(FUNCTIONS.index(text), finite).tolist() == wanted


def test_exp_is_finite_up_to_the_largest_float() -> None:
    x = torch.tensor([87.0, 88.0, 88.3, 88.4, 88.6, 88.72])
    np.testing.assert_allclose(evaluate(0, x).double().numpy(), np.exp(x.double().numpy()), rtol=1e-6)


def test_tiny_arguments_keep_their_precision() -> None:
    """tanh(x) is x near 0, not 0: soft caps of small logits depend on it."""
    x = torch.tensor([1e-7, -1e-10, 3e-20])
    np.testing.assert_allclose(evaluate(FUNCTIONS.index("tanh(x)"), x).numpy(), x.numpy(), rtol=1e-6)
