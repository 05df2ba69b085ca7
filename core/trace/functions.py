"""Functions of floats, comparisons, choices, conversions and constants."""

from __future__ import annotations

import torch

from attnloom.core.trace.errors import untranslatable
from attnloom.core.trace.graph import RANK, Graph, Node
from attnloom.core.trace.table import OPERATIONS, Operation, named
from attnloom.core.trace.types import Operand, alike, as_type, floats, integers, is_bit, promoted, truths

STORED = {
    torch.float64: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""Types that no traced value has, and what stands for them: a kernel computes floats in float32."""


def _refuse_in_place(inplace: object) -> None:
    if inplace:
        raise untranslatable("inplace=True: a traced value cannot be changed", "`x = ...` without it")


def _function(text: str) -> Operation:
    """A function of floats, the C++ of which is ``text``."""

    def apply(g: Graph, input: Operand, *, inplace: bool = False) -> Node:
        _refuse_in_place(inplace)
        return g.operation(text, floats(g, input), torch.float32)

    return apply


def _rounding(name: str) -> Operation:
    """A function of floats that leaves integers as they are."""

    def apply(g: Graph, input: Operand) -> Node:
        (a,) = alike(g, input)
        return g.operation(f"{name}({{0}})", (a,), torch.float32) if a.dtype == torch.float32 else a

    return apply


def _comparison(sign: str) -> Operation:
    def apply(g: Graph, input: Operand, other: Operand) -> Node:
        a, b = alike(g, input, other)
        if sign in ("==", "!=") and is_bit(a) and b.constant in (0, 1):
            return g.operation("{0} > 0" if (sign == "==") == (b.constant == 1) else "{0} < 1", (a,), torch.bool)
        return g.operation(f"{{0}} {sign} {{1}}", (a, b), torch.bool)

    return apply


@named("where")
def _where(g: Graph, condition: Operand, input: Operand, other: Operand) -> Node:
    (chosen,) = truths(g, condition)
    a, b = alike(g, input, other)
    if chosen.constant is not None:
        return a if chosen.constant else b
    if a.is_int:
        return integers(g, "{0} ? {1} : {2}", (chosen, a, b), a.dtype, min(a.low, b.low), max(a.high, b.high))
    return g.operation("{0} ? {1} : {2}", (chosen, a, b), a.dtype)


@named("masked_fill")
def _masked_fill(g: Graph, input: Operand, mask: Operand, value: Operand) -> Node:
    dtype = promoted(input)
    return _where(g, mask, as_type(g, value, dtype), as_type(g, input, dtype))


@named("relu")
def _relu(g: Graph, input: Operand, *, inplace: bool = False) -> Node:
    _refuse_in_place(inplace)
    return OPERATIONS["maximum"](g, input, 0)


@named("reciprocal")
def _reciprocal(g: Graph, input: Operand) -> Node:
    return OPERATIONS["div"](g, 1.0, input)


@named("square")
def _square(g: Graph, input: Operand) -> Node:
    return OPERATIONS["mul"](g, input, input)


@named("to")
def _to(
    g: Graph,
    input: Operand,
    *how: object,
    dtype: object = None,
    device: object = None,
    other: object = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: object = None,
) -> Node:
    """Conversion: ``to(dtype, ...)``, ``to(device, dtype, ...)`` or ``to(other, ...)``; to a device it is nothing."""
    types = [one for one in (*how[:2], dtype, other) if isinstance(one, torch.dtype | Node)]
    rest = [one for one in (*how[1:], dtype, other) if not isinstance(one, torch.dtype | Node)]
    switches = all(one is None or isinstance(one, bool | torch.memory_format) for one in rest)
    if len(types) > 1 or not switches or not all(map(_is_place, (*how[:1], device))):
        raise untranslatable("`to` is given something else than a device and one type", "`x.to(torch.int32)`")
    return _converted(g, input, types[0] if types else promoted(input))


def _is_place(value: object) -> bool:
    """Whether ``to`` may begin with it: a device, or a type, or a value of that type."""
    if isinstance(value, str):
        try:
            torch.device(value)
        except RuntimeError:
            return False
    return value is None or isinstance(value, str | int | torch.device | torch.dtype | Node)


_TENSOR_TYPES = {
    f"torch.{name}Tensor": getattr(torch, f"{name}Tensor").dtype
    for name in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Char", "Byte", "Bool")
}
"""The names that Tensor.type takes instead of types."""


@named("type")
def _type(g: Graph, input: Operand, dtype: object, non_blocking: bool = False) -> Node:
    wanted = _TENSOR_TYPES.get(dtype.replace("torch.cuda.", "torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype):
        raise untranslatable(f"{dtype!r} is no type of torch", "`x.to(torch.int32)`")
    return _converted(g, input, wanted)


@named("type_as")
def _type_as(g: Graph, input: Operand, other: Operand) -> Node:
    return _converted(g, input, promoted(other))


def _converted(g: Graph, input: Operand, like: torch.dtype | Node) -> Node:
    dtype = like.dtype if isinstance(like, Node) else STORED.get(like, like)
    if dtype not in RANK:
        raise untranslatable(f"no value is of type {dtype}", f"one of {', '.join(map(str, RANK))}")
    return as_type(g, input, dtype)


def _conversion(dtype: torch.dtype) -> Operation:
    def apply(g: Graph, input: Operand) -> Node:
        return as_type(g, input, dtype)

    return apply


def _filled(value: int) -> Operation:
    """zeros_like, new_ones and their kin: a constant of the value's type."""

    def apply(g: Graph, input: Operand, size: object = (), *, dtype: torch.dtype | None = None, **_: object) -> Node:
        return _full(g, input, value, size, dtype=dtype)

    return apply


@named("softplus")
def _softplus(g: Graph, input: Operand, beta: float = 1, threshold: float = 20) -> Node:
    if (beta, threshold) != (1, 20):
        raise untranslatable(f"softplus with beta={beta} and threshold={threshold}", "softplus(x), or log1p(exp(x))")
    return g.operation("softplus({0})", floats(g, input), torch.float32)


@named("isnan")
def _isnan(g: Graph, input: Operand) -> Node:
    return g.operation("{0} != {0}", floats(g, input), torch.bool)


@named("full_like")
def _full_like(g: Graph, input: Operand, fill_value: Operand, *, dtype: torch.dtype | None = None, **_: object) -> Node:
    return _full(g, input, fill_value, dtype=dtype)


@named("new_full")
def _new_full(
    g: Graph, input: Operand, size: object, fill_value: Operand, *, dtype: torch.dtype | None = None, **_: object
) -> Node:
    return _full(g, input, fill_value, size, dtype=dtype)


@named("new_tensor")
def _new_tensor(g: Graph, input: Operand, data: Operand, *, dtype: torch.dtype | None = None, **_: object) -> Node:
    return _full(g, input, data, dtype=dtype or promoted(data))


def _full(g: Graph, like: Operand, value: Operand, size: object = (), *, dtype: torch.dtype | None = None) -> Node:
    if not isinstance(size, tuple | list | torch.Size) or len(size):
        raise untranslatable(
            f"a tensor of shape {size} inside a hook; values there are single numbers", "the shape `()`"
        )
    return _converted(g, value, dtype or promoted(like))


for _name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos", "tanh", "erf"):
    named(_name)(_function(f"{_name}({{0}})"))
named("sigmoid", "expit")(_function("sigmoid({0})"))
named("rsqrt")(_function("1.0f / sqrt({0})"))
named("log10")(_function("log2({0}) * 0.301029996f"))
named("tan")(_function("sin({0}) / cos({0})"))
named("silu")(_function("{0} * sigmoid({0})"))
named("floor")(_rounding("floor"))
named("ceil")(_rounding("ceil"))
named("trunc", "fix")(_rounding("trunc"))
named("round")(_rounding("round"))
for _names, _sign in (
    (("eq",), "=="),
    (("ne", "not_equal"), "!="),
    (("lt", "less"), "<"),
    (("le", "less_equal"), "<="),
    (("gt", "greater"), ">"),
    (("ge", "greater_equal"), ">="),
):
    named(*_names)(_comparison(_sign))
named("float", "double")(_conversion(torch.float32))
named("int")(_conversion(torch.int32))
named("long")(_conversion(torch.int64))
named("bool")(_conversion(torch.bool))
named("zeros_like", "new_zeros")(_filled(0))
named("ones_like", "new_ones")(_filled(1))
