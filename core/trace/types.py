"""Types of traced values: torch's promotion, conversions, and integers in the width they need."""

from __future__ import annotations

import math

import torch

from attnloom.core.trace.errors import untranslatable
from attnloom.core.trace.graph import RANGES, RANK, Graph, Node, fits_int32

Operand = Node | bool | int | float
"""What an operation takes: a value, or a Python number, which in torch yields to the type of the values."""


def promoted(*operands: Operand) -> torch.dtype:
    """The type that torch gives an operation on ``operands``, which are as good as tensors without dimensions."""
    strong = [operand.dtype for operand in operands if isinstance(operand, Node)]
    dtype = max(strong, key=RANK.__getitem__) if strong else torch.bool
    if dtype == torch.int8 and torch.uint8 in strong:
        dtype = torch.int16
    for operand in operands:
        if isinstance(operand, float):
            dtype = torch.float32
        elif isinstance(operand, int) and not isinstance(operand, bool) and dtype == torch.bool:
            dtype = torch.int64
    return dtype


def as_type(g: Graph, operand: Operand, dtype: torch.dtype) -> Node:
    """``operand`` as ``dtype``; to fewer bits or from floats as C and torch convert."""
    if not isinstance(operand, Node):
        return _number(g, operand, dtype)
    if operand.dtype == dtype:
        return operand
    if operand.constant is not None and dtype not in _MASKS:
        return _number(g, operand.constant, dtype)
    if dtype == torch.bool:
        unequal = "{0} != 0.0f" if operand.dtype == torch.float32 else "{0} != 0"
        return g.operation("{0} > 0" if is_bit(operand) else unequal, (operand,), dtype)
    if dtype == torch.float32:
        exact = operand.wide and operand.low >= -(2**51) and operand.high <= 2**51
        return g.operation("wide_float({0})" if exact else "float({0})", (operand,), dtype, inline=True)
    if operand.dtype == torch.float32:
        if dtype == torch.int64:
            return g.operation("wide_int({0})", (operand,), dtype, -(2**51), 2**51)
        if operand.constant is not None:
            return wrapped(g, _number(g, operand.constant, torch.int32), dtype)
        return wrapped(g, g.operation("int32_t({0})", (operand,), torch.int32), dtype)
    if operand.dtype == torch.bool:
        return g.operation("int32_t({0})", (operand,), dtype, 0, 1, inline=True)
    return wrapped(g, operand, dtype)


_MASKS = {torch.uint8: (255, 0), torch.int8: (255, 128), torch.int16: (65535, 32768)}
"""Types of fewer bits than a kernel computes with: the bits they have, and the one that is their sign."""


def wrapped(g: Graph, node: Node, dtype: torch.dtype) -> Node:
    """An integer brought into the range of ``dtype`` as two's complement does."""
    low, high = RANGES[dtype]
    if low <= node.low and node.high <= high:
        return node if node.dtype == dtype else g.operation("{0}", (node,), dtype, node.low, node.high, inline=True)
    if dtype in _MASKS:
        mask, sign = _MASKS[dtype]
        text = f"int32_t(({{0}} & {mask}) ^ {sign}) - {sign}" if sign else f"int32_t({{0}} & {mask})"
        return g.operation(text, (node,), dtype)
    return g.operation("int32_t({0})", (node,), dtype)


def integers(g: Graph, text: str, args: tuple[Node, ...], dtype: torch.dtype, low: int, high: int) -> Node:
    """An operation on integers of type ``dtype`` whose exact result lies in low..high, computed wide enough for it."""
    wide = not fits_int32(low, high) or any(arg.wide for arg in args)
    if wide:
        args = tuple(_widened(g, arg) for arg in args)
    lowest, highest = RANGES[torch.int64]
    if low < lowest or high > highest:
        low, high = lowest, highest
    return wrapped(g, g.operation(text, args, torch.int64, low, high), dtype)


def alike(g: Graph, *operands: Operand) -> tuple[Node, ...]:
    """The operands in the type they promote to; integers in one width."""
    dtype = promoted(*operands)
    nodes = tuple(as_type(g, operand, dtype) for operand in operands)
    return tuple(_widened(g, node) for node in nodes) if any(node.wide for node in nodes) else nodes


def floats(g: Graph, *operands: Operand) -> tuple[Node, ...]:
    """The operands as float32."""
    return tuple(as_type(g, operand, torch.float32) for operand in operands)


def is_bit(node: Node) -> bool:
    """Whether it is an integer that is 0 or 1.

    Such a one is tested by order: ``x == 1`` is to gcc a conversion to bool, which it does not vectorise.
    """
    return node.is_int and node.low >= 0 and node.high <= 1 and node.constant is None


def truths(g: Graph, *operands: Operand) -> tuple[Node, ...]:
    """The operands as bool: whether they differ from 0."""
    return tuple(as_type(g, operand, torch.bool) for operand in operands)


_WIDENED = "int64_t({0})"


def _widened(g: Graph, node: Node) -> Node:
    if node.wide or not node.is_int or node.text == _WIDENED:
        return node
    return g.operation(_WIDENED, (node,), node.dtype, node.low, node.high, inline=True)


def _number(g: Graph, number: bool | int | float, dtype: torch.dtype) -> Node:
    if not isinstance(number, bool | int | float):
        raise untranslatable(f"{number!r} stands where a number is wanted", "a number, or a traced value")
    if dtype not in (torch.bool, torch.float32):
        low, high = RANGES[dtype]
        if not math.isfinite(number) or not low <= int(number) <= high:
            raise untranslatable(f"{number} does not fit {dtype}", f"a number from {low} to {high}")
        return g.constant(int(number), dtype)
    return g.constant(bool(number) if dtype == torch.bool else float(number), dtype)
