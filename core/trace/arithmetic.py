"""Arithmetic, bits and logic with torch's rules: integers divide downwards as Python's, ``/`` of integers is a float.

The ranges of integers are followed, so that 32 bits are used where they are enough.
"""

from __future__ import annotations

import math

import torch

from attnloom.core.trace.errors import untranslatable
from attnloom.core.trace.graph import RANGES, Graph, Node
from attnloom.core.trace.table import named
from attnloom.core.trace.types import Operand, alike, as_type, floats, integers, promoted, truths

FLOATS = torch.float32


@named("add")
def _add(g: Graph, input: Operand, other: Operand, *, alpha: Operand = 1) -> Node:
    if alpha != 1:
        other = _mul(g, other, alpha)
    dtype = promoted(input, other)
    a, b = (as_type(g, x, dtype) for x in (input, other))
    if dtype == torch.bool:
        return g.operation("{0} | {1}", (a, b), dtype)
    if dtype == FLOATS:
        return g.operation("{0} + {1}", (a, b), dtype)
    return integers(g, "{0} + {1}", (a, b), dtype, a.low + b.low, a.high + b.high)


@named("sub", "subtract")
def _sub(g: Graph, input: Operand, other: Operand, *, alpha: Operand = 1) -> Node:
    if alpha != 1:
        other = _mul(g, other, alpha)
    dtype = promoted(input, other)
    a, b = (as_type(g, x, dtype) for x in (input, other))
    if dtype == torch.bool:
        raise untranslatable("bools cannot be subtracted, as in torch", "`a ^ b`, or `~b` for `1 - b`")
    if dtype == FLOATS:
        return g.operation("{0} - {1}", (a, b), dtype)
    return integers(g, "{0} - {1}", (a, b), dtype, a.low - b.high, a.high - b.low)


@named("rsub")
def _rsub(g: Graph, input: Operand, other: Operand, *, alpha: Operand = 1) -> Node:
    return _sub(g, other, input, alpha=alpha)


@named("mul", "multiply")
def _mul(g: Graph, input: Operand, other: Operand) -> Node:
    dtype = promoted(input, other)
    a, b = (as_type(g, x, dtype) for x in (input, other))
    if dtype == torch.bool:
        return g.operation("{0} & {1}", (a, b), dtype)
    if dtype == FLOATS:
        return g.operation("{0} * {1}", (a, b), dtype)
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return integers(g, "{0} * {1}", (a, b), dtype, min(corners), max(corners))


@named("div", "divide", "true_divide")
def _div(g: Graph, input: Operand, other: Operand, *, rounding_mode: str | None = None) -> Node:
    if rounding_mode not in (None, "floor", "trunc"):
        raise untranslatable(f"rounding_mode={rounding_mode!r} is none of torch's", '"floor", "trunc" or None')
    if rounding_mode == "floor":
        return _floor_divide(g, input, other)
    if rounding_mode == "trunc" and promoted(input, other) != FLOATS:
        return _divided(g, input, other, "trunc_div")
    quotient = g.operation("{0} / {1}", floats(g, input, other), FLOATS)
    return g.operation("trunc({0})", (quotient,), FLOATS) if rounding_mode == "trunc" else quotient


@named("floor_divide")
def _floor_divide(g: Graph, input: Operand, other: Operand) -> Node:
    if promoted(input, other) == FLOATS:
        a, b = floats(g, input, other)
        if b.constant is not None and math.isinf(b.constant):
            raise untranslatable("floor division by an infinity", "a finite divisor")
        return g.operation("floor_div({0}, {1})", (a, b), FLOATS)
    return _divided(g, input, other, "floor_div")


def _divided(g: Graph, input: Operand, other: Operand, function: str) -> Node:
    """Integer division; the quotient rounds down or, with trunc_div, towards 0."""
    a, b, dtype = _dividends(g, input, other)
    size = max(abs(a.low), abs(a.high))
    low, high = -size, size
    if b.low > 0 or b.high < 0:
        corners = [x // y for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = min(corners), max(corners) + (function == "trunc_div")
    if b.constant == 1:
        return as_type(g, a, dtype)
    divisor = 0 if b.constant is None else int(b.constant)
    if function == "floor_div" and _is_power_of_two(divisor):
        return integers(g, f"{{0}} >> {divisor.bit_length() - 1}", (a,), dtype, low, high)
    if a.low >= 0 and divisor > 0:
        return integers(g, "{0} / {1}", (a, b), dtype, low, high)
    return integers(g, f"{function}({{0}}, {{1}})", (a, b), dtype, low, high)


@named("remainder")
def _remainder(g: Graph, input: Operand, other: Operand) -> Node:
    if promoted(input, other) == FLOATS:
        return g.operation("floor_mod({0}, {1})", floats(g, input, other), FLOATS)
    a, b, dtype = _dividends(g, input, other)
    low, high = min(0, b.low + 1), max(0, b.high - 1)
    if a.low >= 0 and b.low > 0:
        high = min(high, a.high)
    divisor = 0 if b.constant is None else int(b.constant)
    if _is_power_of_two(divisor):
        return integers(g, f"{{0}} & {divisor - 1}", (a,), dtype, low, high)
    if a.low >= 0 and divisor > 0:
        return integers(g, "{0} % {1}", (a, b), dtype, low, high)
    return integers(g, "floor_mod({0}, {1})", (a, b), dtype, low, high)


@named("fmod")
def _fmod(g: Graph, input: Operand, other: Operand) -> Node:
    if promoted(input, other) == FLOATS:
        return g.operation("trunc_mod({0}, {1})", floats(g, input, other), FLOATS)
    a, b, dtype = _dividends(g, input, other)
    size = max(abs(b.low), abs(b.high)) - 1
    return integers(g, "trunc_mod({0}, {1})", (a, b), dtype, -size if a.low < 0 else 0, size)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _dividends(g: Graph, input: Operand, other: Operand) -> tuple[Node, Node, torch.dtype]:
    dtype = promoted(input, other)
    if dtype == torch.bool:
        raise untranslatable("bools cannot be divided", "`x.int()` first")
    a, b = as_type(g, input, dtype), as_type(g, other, dtype)
    if b.constant == 0:
        raise untranslatable("integer division by zero", "another divisor")
    return a, b, dtype


@named("pow")
def _pow(g: Graph, input: Operand, exponent: Operand) -> Node:
    power = exponent.constant if isinstance(exponent, Node) else exponent
    if promoted(input, exponent) != FLOATS:
        if isinstance(power, int) and 0 <= power <= 8:
            return _int_power(g, input, power)
        if not isinstance(input, Node) and input == 2:
            return _bitwise_left_shift(g, 1, exponent)
        raise untranslatable(
            "an integer to the power of an integer that is no constant from 0 to 8", "`x.float() ** y`"
        )
    base, raised = floats(g, input, exponent)
    if base.constant == 2.0:
        return g.operation("exp2({0})", (raised,), FLOATS)
    if power == 0.5:
        return g.operation("sqrt({0})", (base,), FLOATS)
    if power in (2, 3):
        return g.operation(" * ".join(["{0}"] * int(power)), (base,), FLOATS)
    if power in (-1, -0.5):
        return g.operation("1.0f / {0}" if power == -1 else "1.0f / sqrt({0})", (base,), FLOATS)
    return g.operation("pow({0}, {1})", (base, raised), FLOATS)


def _int_power(g: Graph, base: Operand, power: int) -> Node:
    dtype = promoted(base, 1)
    result = g.constant(1, dtype)
    for _ in range(power):
        result = as_type(g, base, dtype) if result.constant == 1 else _mul(g, result, base)
    return result


@named("neg", "negative")
def _neg(g: Graph, input: Operand) -> Node:
    dtype = promoted(input)
    a = as_type(g, input, dtype)
    if dtype == torch.bool:
        raise untranslatable("a bool has no negative, as in torch", "`~x`")
    if dtype == FLOATS:
        return g.constant(-float(a.constant), dtype) if a.constant is not None else g.operation("-{0}", (a,), dtype)
    return integers(g, "-{0}", (a,), dtype, -a.high, -a.low)


@named("positive", "detach", "clone", "contiguous")
def _positive(g: Graph, input: Operand) -> Node:
    return as_type(g, input, promoted(input))


@named("abs", "absolute")
def _abs(g: Graph, input: Operand) -> Node:
    dtype = promoted(input)
    a = as_type(g, input, dtype)
    if dtype == FLOATS:
        return g.operation("abs({0})", (a,), dtype)
    if a.low >= 0:
        return a
    return integers(g, "abs({0})", (a,), dtype, max(0, a.low, -a.high), max(abs(a.low), abs(a.high)))


@named("sign", "sgn")
def _sign(g: Graph, input: Operand) -> Node:
    dtype = promoted(input)
    a = as_type(g, input, dtype)
    if dtype == FLOATS:
        return g.operation("sign({0})", (a,), dtype)
    return integers(g, "({0} > 0) - ({0} < 0)", (a,), dtype, -1, 1)


@named("minimum", "min")
def _minimum(g: Graph, input: Operand, other: Operand) -> Node:
    return _nearer(g, "min", input, other)


@named("maximum", "max")
def _maximum(g: Graph, input: Operand, other: Operand) -> Node:
    return _nearer(g, "max", input, other)


def _nearer(g: Graph, which: str, input: Operand, other: Operand) -> Node:
    a, b = alike(g, input, other)
    if a.dtype == FLOATS:
        return g.operation(f"{which}imum({{0}}, {{1}})", (a, b), FLOATS)
    if a.dtype == torch.bool:
        return g.operation("{0} & {1}" if which == "min" else "{0} | {1}", (a, b), torch.bool)
    pick = min if which == "min" else max
    return integers(g, f"{which}({{0}}, {{1}})", (a, b), a.dtype, pick(a.low, b.low), pick(a.high, b.high))


@named("clamp", "clip")
def _clamp(g: Graph, input: Operand, min: Operand | None = None, max: Operand | None = None) -> Node:
    if min is None and max is None:
        raise untranslatable("clamp without min and max, as in torch", "at least one of them")
    if min is not None:
        input = _maximum(g, input, min)
    if max is not None:
        input = _minimum(g, input, max)
    return _positive(g, input)


@named("bitwise_left_shift")
def _bitwise_left_shift(g: Graph, input: Operand, other: Operand) -> Node:
    a, b = alike(g, input, other)
    low, high = RANGES[torch.int64]
    if b.low >= 0 and b.high < 64:
        corners = [x << y for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = min(corners), max(corners)
    return integers(g, "shift_left({0}, {1})", (a, b), _whole(a), low, high)


@named("bitwise_right_shift")
def _bitwise_right_shift(g: Graph, input: Operand, other: Operand) -> Node:
    a, b = alike(g, input, other)
    return integers(g, "shift_right({0}, {1})", (a, b), _whole(a), min(a.low, 0), max(a.high, 0))


@named("bitwise_and")
def _bitwise_and(g: Graph, input: Operand, other: Operand) -> Node:
    a, b = alike(g, input, other)
    if a.dtype == torch.bool:
        return _logical_and(g, a, b)
    ends = [x.high for x in (a, b) if x.low >= 0]
    low, high = (0, min(ends)) if ends else (-_bits(a, b) - 1, _bits(a, b))
    return integers(g, "{0} & {1}", (a, b), _whole(a), low, high)


@named("bitwise_or")
def _bitwise_or(g: Graph, input: Operand, other: Operand) -> Node:
    a, b = alike(g, input, other)
    if a.dtype == torch.bool:
        return _logical_or(g, a, b)
    low = 0 if a.low >= 0 and b.low >= 0 else -_bits(a, b) - 1
    return integers(g, "{0} | {1}", (a, b), _whole(a), low, _bits(a, b))


@named("bitwise_xor")
def _bitwise_xor(g: Graph, input: Operand, other: Operand) -> Node:
    a, b = alike(g, input, other)
    if a.dtype == torch.bool:
        return _logical_xor(g, a, b)
    low = 0 if a.low >= 0 and b.low >= 0 else -_bits(a, b) - 1
    return integers(g, "{0} ^ {1}", (a, b), _whole(a), low, _bits(a, b))


@named("bitwise_not")
def _bitwise_not(g: Graph, input: Operand) -> Node:
    (a,) = alike(g, input)
    if a.dtype == torch.bool:
        return _logical_not(g, a)
    return integers(g, "~{0}", (a,), _whole(a), -a.high - 1, -a.low - 1)


def _whole(node: Node) -> torch.dtype:
    if node.dtype == FLOATS:
        raise untranslatable("& | ^ ~ << >> take bools and integers, not floats, as in torch", "a comparison, `x > 0`")
    return node.dtype


def _bits(a: Node, b: Node) -> int:
    """The largest number of as many bits as a or b has."""
    size = max(a.high, b.high, -a.low - 1, -b.low - 1, 0)
    return int((1 << size.bit_length()) - 1)


@named("logical_and")
def _logical_and(g: Graph, input: Operand, other: Operand) -> Node:
    a, b = truths(g, input, other)
    for one, rest in ((a, b), (b, a)):
        if one.constant is not None:
            return rest if one.constant else one
    return g.operation("{0} & {1}", (a, b), torch.bool)


@named("logical_or")
def _logical_or(g: Graph, input: Operand, other: Operand) -> Node:
    a, b = truths(g, input, other)
    for one, rest in ((a, b), (b, a)):
        if one.constant is not None:
            return one if one.constant else rest
    return g.operation("{0} | {1}", (a, b), torch.bool)


@named("logical_xor")
def _logical_xor(g: Graph, input: Operand, other: Operand) -> Node:
    return g.operation("{0} != {1}", truths(g, input, other), torch.bool)


@named("logical_not")
def _logical_not(g: Graph, input: Operand) -> Node:
    (a,) = truths(g, input)
    if a.constant is not None:
        return g.constant(not a.constant, torch.bool)
    return g.operation("!{0}", (a,), torch.bool)
