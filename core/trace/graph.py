"""The traced hook: a graph of operations, and the C++ it is written as, one line per operation (SSA).

Integers are exact. Each carries the range it can lie in, so that those that fit 32 bits are computed in 32 bits, which
is what vectorises well, and the others in 64, whatever torch calls their type.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

RANK = {
    torch.bool: 0,
    torch.uint8: 1,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.float32: 6,
}
"""The types of traced values. Of two the one of higher rank is torch's promotion, but for uint8 and int8: int16."""

RANGES = {
    torch.bool: (0, 1),
    torch.uint8: (0, 255),
    torch.int8: (-(2**7), 2**7 - 1),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.int64: (-(2**63), 2**63 - 1),
    torch.float32: (0, 0),
}

Text = str | Callable[[tuple[str, ...]], str]


@dataclass(frozen=True, eq=False)
class Node:
    """One value.

    Attributes:
        text: C++ with ``{0}``, ``{1}`` where the arguments go, or a function that makes it from them.
        args: what it is computed from.
        dtype: as torch has it, one of RANK.
        low, high: range of an integer, inclusive.
        inline: written where it is used, not on a line of its own.
        constant: its value, if known.
    """

    text: Text
    args: tuple[Node, ...]
    dtype: torch.dtype
    low: int
    high: int
    inline: bool
    constant: bool | int | float | None

    @property
    def wide(self) -> bool:
        """Whether it is an integer that needs 64 bits."""
        return self.is_int and not fits_int32(self.low, self.high)

    @property
    def is_int(self) -> bool:
        """Whether it is an integer and not a bool."""
        return 0 < RANK[self.dtype] < RANK[torch.float32]

    @property
    def cpp_type(self) -> str:
        """Its type in the kernel."""
        if self.is_int:
            return "int64_t" if self.wide else "int32_t"
        return "bool" if self.dtype == torch.bool else "float"


def fits_int32(low: int, high: int) -> bool:
    """Whether all integers from low to high do."""
    return low >= -(2**31) and high < 2**31


class Graph:
    """Makes nodes, each once: the same operation on the same arguments is the same node."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[object, ...], Node] = {}

    def leaf(self, name: str, dtype: torch.dtype, low: int = 0, high: int = 0) -> Node:
        """A name of the dialect."""
        return self._node(name, (), dtype, low, high, inline=True)

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Node:
        """A number as ``dtype``; a bool for torch.bool, an int for integers (in range), a float for float32."""
        if dtype == torch.float32:
            return self._node(float_literal(float(value)), (), dtype, 0, 0, inline=True, constant=float(value))
        number = bool(value) if dtype == torch.bool else int(value)
        return self._node(_int_literal(number), (), dtype, int(number), int(number), inline=True, constant=number)

    def operation(
        self,
        text: Text,
        args: tuple[Node, ...],
        dtype: torch.dtype,
        low: int | None = None,
        high: int | None = None,
        *,
        inline: bool = False,
    ) -> Node:
        """An operation; without a range, an integer may be anything of its type."""
        lowest, highest = RANGES[dtype]
        return self._node(
            text, args, dtype, lowest if low is None else low, highest if high is None else high, inline=inline
        )

    def _node(
        self,
        text: Text,
        args: tuple[Node, ...],
        dtype: torch.dtype,
        low: int,
        high: int,
        *,
        inline: bool,
        constant: bool | int | float | None = None,
    ) -> Node:
        key = (text, *(id(arg) for arg in args), dtype, low, high)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = Node(text, args, dtype, low, high, inline, constant)
        return found

    def live(self, result: Node) -> list[Node]:
        """Everything that ``result`` needs, each after what it is computed from, itself last."""
        needed = {id(result)}
        for node in reversed(self._nodes.values()):
            if id(node) in needed:
                needed.update(id(arg) for arg in node.args)
        return [node for node in self._nodes.values() if id(node) in needed]

    def emit(self, result: Node) -> str:
        """The body of a C++ function that returns ``result``."""
        names: dict[int, str] = {}
        lines: list[str] = []
        for node in self.live(result):
            args = tuple(names[id(arg)] for arg in node.args)
            text = node.text.format(*args) if isinstance(node.text, str) else node.text(args)
            if node.inline or node is result:
                names[id(node)] = text
            else:
                names[id(node)] = f"t{len(lines)}"
                lines.append(f"const {node.cpp_type} t{len(lines)} = {text};")
        return "\n".join([*lines, f"return {names[id(result)]};"])


def float_literal(value: float) -> str:
    """The shortest C++ literal that is the float32 nearest to ``value``."""
    if math.isnan(value):
        return "kNan"
    try:
        single = struct.unpack("<f", _single(value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    if math.isinf(single):
        return "kInf" if single > 0 else "(-kInf)"
    shortest = next(
        text for digits in range(1, 10) if _single(float(text := f"{single:.{digits}g}")) == _single(single)
    )
    text = repr(float(shortest))
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def _single(value: float) -> bytes:
    return struct.pack("<f", value)


def _int_literal(value: bool | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == -(2**63):
        return "(-INT64_C(9223372036854775807) - 1)"
    text = str(value) if fits_int32(value, value) else f"INT64_C({value})"
    return f"({text})" if value < 0 else text
