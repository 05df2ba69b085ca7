"""Functions that have no translation: the error says where, why and what to write instead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnloom
from attnloom import Param, TraceError, Variant

SLOPES = torch.arange(1.0, 7.0)
TABLE = torch.zeros(6, 9)


def _branch(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx > kv_idx:  # HERE
        return score
    return score * 2


def _and(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    near = q_idx > kv_idx and kv_idx > 3  # HERE
    return torch.where(near, score, 0)


def _not(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(not (q_idx == kv_idx), score, 0)  # noqa: SIM201  HERE


def _chained(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(3 < q_idx < 7, score, 0)  # HERE


def _builtin(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return max(score, 0)  # HERE


def _among(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (h in (1, 2))  # HERE


def _item(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + q_idx.item()  # HERE


def _python_math(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return math.tanh(score)  # HERE


def _list(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + [1.0, 2.0][h]  # HERE


def _loop(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for _ in range(q_idx):  # HERE
        score = score + 1
    return score


def _unknown(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    helper = torch.lgamma(  # HERE
        score
    )
    return helper


def _method(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.cumsum(0)  # HERE


def _in_place(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.add_(1)  # HERE


def _indices(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h, q_idx]  # HERE


def _whole(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES  # HERE


def _half_indexed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    row = TABLE[h]
    return score + row  # HERE


def _slice(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, :].sum()  # HERE


def _outside(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, 9]  # HERE


def _float_index(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[q_idx / 2]  # HERE


def _zero(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + q_idx // 0  # HERE


def _bool_minus(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (1 - (q_idx > 3)) - ((q_idx > 3) - (q_idx > 4))  # HERE


def _complex(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.zeros(3, dtype=torch.complex64)[h]  # HERE


def _iterated(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return sum(SLOPES[h], score) + sum(score)  # HERE


def _numpy_like(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + "1"  # HERE


UNTRANSLATABLE = [
    (_branch, r"torch\.where"),
    (_and, r"\(a\) & \(b\)"),
    (_not, "~x"),
    (_chained, r"\(a < b\) & \(b < c\)"),
    (_builtin, r"torch\.maximum"),
    (_among, r"\(x == a\) \| \(x == b\)"),
    (_item, "Python number"),
    (_python_math, "torch's functions instead of math's"),
    (_list, r"torch\.tensor\(list\)"),
    (_loop, "Python number"),
    (_unknown, "lgamma has no translation"),
    (_method, "cumsum has no translation"),
    (_in_place, "add_ has no translation"),
    (_indices, "too many indices for SLOPES"),
    (_whole, r"SLOPES, a tensor of shape \(6,\)"),
    (_half_indexed, "TABLE with 1 of 2 dimensions"),
    (_slice, "every dimension takes one number"),
    (_outside, "index 9 is out of range for dimension 1 of TABLE, which has size 9"),
    (_float_index, "no integer"),
    (_zero, "division by zero"),
    (_bool_minus, "bools cannot be subtracted"),
    (_complex, "complex64"),
    (_iterated, "iterated"),
    (_numpy_like, "type str"),
]


@pytest.mark.parametrize(("function", "says"), UNTRANSLATABLE, ids=lambda value: getattr(value, "__name__", ""))
def test_what_has_no_translation_is_shown(function: Callable[..., Any], says: str) -> None:
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, text in enumerate(lines) if "HERE" in text)
    with pytest.raises(TypeError, match=says) as caught:
        attnloom.score_mod(function)
    error = caught.value
    assert isinstance(error, TraceError) and isinstance(error, attnloom.AttnloomError)
    assert (error.file, error.line) == (__file__, line)
    assert f"{__file__}:{line}" in str(error) and "HERE" in error.source and error.source in str(error)
    assert "\n  Write " in str(error)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: attnloom.score_mod(lambda score, q_idx: score), "FlexAttention's 5 arguments"),
        (lambda: attnloom.mask_mod(lambda score, b, h, q, k: True), "FlexAttention's 4 arguments"),
        (lambda: Variant("x", query_transform=lambda query, dimension: query[dimension]), "dimension"),
        (lambda: Variant("x", key_transform=lambda key, dim, q_pos: key[dim]), "q_pos"),
        (lambda: attnloom.mask_mod(lambda b, h, q, k: q - k), "returns a value of torch.int64"),
        (lambda: attnloom.score_mod(lambda score, b, h, q, k: None), "returns None"),
        (lambda: attnloom.score_mod(lambda score, b, h, q, k: SLOPES), "returns tensor"),
        (lambda: Variant("x", logits_transform=lambda logits, params: logits * params.cap), "params has no 'cap'"),
        (lambda: Variant("x", query_transform=lambda query, dim: query[dim / 2]), "query is indexed by"),
        (lambda: Variant("x", query_transform=lambda query, dim: query), "returns"),
    ],
)
def test_functions_that_do_not_fit(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        make()
    assert caught.value.file == __file__ and caught.value.line > 0


def test_errors_of_the_function_itself_pass_through() -> None:
    def broken(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        attnloom.score_mod(broken)


def test_keywords_of_cpp_are_no_names() -> None:
    with pytest.raises(ValueError, match="keyword"):
        Param("class")


@pytest.mark.parametrize("given", [3, ("return logits;", 3), None])
def test_hooks_that_are_neither_text_nor_function(given: Any) -> None:
    with pytest.raises(TypeError, match=r"Variant\.logits_transform=.*expected C\+\+ text or a Python function"):
        Variant("x", logits_transform=given)


def test_ranges_are_text() -> None:
    with pytest.raises(TypeError, match=r"Variant\.visible=.*expected C\+\+ text$"):
        Variant("x", visible=lambda kv_len: kv_len)
