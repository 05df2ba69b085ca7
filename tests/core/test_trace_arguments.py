"""Arguments of torch's functions in a traced hook: honoured or refused, never dropped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnloom
from attnloom import TraceError

THREE = torch.tensor(3, dtype=torch.int32)
EMPTY = torch.zeros(4, 0)

Expression = Callable[[Any], Any]


def _text(expression: Expression) -> tuple[str, ...]:
    return attnloom.score_mod(lambda score, b, h, q, k: expression(score)).texts("logits_transform")


@pytest.mark.parametrize(
    "expression",
    [
        lambda x: x.to(torch.int32),
        lambda x: x.to("cpu", torch.int32),
        lambda x: x.to(torch.device("cpu"), torch.int32, True),
        lambda x: x.to(x.device, torch.int32, memory_format=torch.preserve_format),
        lambda x: x.to(0, torch.int32),
        lambda x: x.to(None, torch.int32),
        lambda x: x.to(device="cpu", dtype=torch.int32),
        lambda x: x.to(torch.int32, False, True),
        lambda x: x.to(THREE),
        lambda x: x.to(other=THREE),
        lambda x: x.type("torch.IntTensor"),
        lambda x: x.type("torch.cuda.IntTensor"),
        lambda x: x.type(torch.int32, True),
        lambda x: x.type_as(THREE),
        lambda x: x.int(),
    ],
)
def test_every_way_to_name_a_type_converts(expression: Expression) -> None:
    assert _text(expression) == ("const int32_t t0 = int32_t(logits);\nreturn float(t0);",)


@pytest.mark.parametrize("expression", [lambda x: x.to("cpu"), lambda x: x.to(x.device, copy=True), lambda x: x.to()])
def test_a_device_alone_is_nothing(expression: Expression) -> None:
    assert _text(expression) == ()


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        (lambda x: x.to("int32"), "something else than a device and one type"),
        (lambda x: x.to(torch.int32, torch.int64), "something else"),
        (lambda x: x.to("cpu", "int32"), "something else"),
        (lambda x: x.to(dtype="int32"), "something else"),
        (lambda x: x.to(0.5), "something else"),
        (lambda x: x.to(torch.int32, bogus=1), "bogus"),
        (lambda x: x.to(torch.complex64), "complex64"),
        (lambda x: x.type("torch.ComplexTensor"), "torch.ComplexTensor"),
        (lambda x: x.type(), "dtype"),
        (lambda x: torch.div(x, x + 1, rounding_mode="bogus"), "rounding_mode='bogus'"),
        (lambda x: torch.nn.functional.relu(x, inplace=True), "inplace"),
        (lambda x: torch.nn.functional.silu(x, inplace=True), "inplace"),
        (lambda x: x.clamp(min="3"), "type str"),
        (lambda x: x.clamp(), "without min and max"),
        (lambda x: x + None, "None stands where a number is wanted"),
        (lambda x: x * [2], r"\[2\] stands where"),
        (lambda x: x.new_zeros(0) + x, "shape 0"),
        (lambda x: torch.cond(x > 0, lambda y: y, lambda y: -y, (x,)), "torch cannot do this.*RuntimeError"),
        (lambda x: torch.vmap(lambda y: y + 1)(x), "torch cannot do this.*ValueError"),
        (lambda x: x // math.inf, "floor division by an infinity"),
        (lambda x: x + torch.full_like(x, math.inf).int(), "inf does not fit torch.int32"),
        (lambda x: x + torch.full_like(x, 1e20).to(torch.uint8), "does not fit torch.int32"),
        (lambda x: x + torch.full_like(x.int(), math.nan), "nan does not fit torch.int32"),
        (lambda x: x + EMPTY[x.int() & 3, 0], "EMPTY has no elements: dimension 1 has size 0"),
    ],
)
def test_arguments_that_have_no_translation_are_refused_with_the_line(expression: Expression, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        _text(expression)
    assert caught.value.file == __file__
    assert "(lambda x: " in caught.value.source, "the line of the expression, not that of its caller"


def test_errors_of_torch_with_tensors_alone_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _text(lambda x: x + torch.nn.Linear(3, 2)(EMPTY)[0, 0])
