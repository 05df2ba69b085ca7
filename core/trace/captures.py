"""Tensors that a hook's function captures: what they are called, and how a kernel reads them."""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from attnloom.core.trace.errors import untranslatable
from attnloom.core.trace.functions import STORED
from attnloom.core.trace.graph import RANK, Graph, Node
from attnloom.core.trace.types import Operand, as_type, wrapped
from attnloom.core.variant import Param

_DEEPEST = 5
_PLAIN = (bool, int, float, complex, str, bytes, type, ModuleType, CodeType, torch.dtype, torch.device)


class Names:
    """Names of the tensors within reach of a function: closure, globals, defaults, and attributes of objects."""

    def __init__(self, function: object) -> None:
        self._seen: dict[int, object] = {}
        self._names: dict[int, str] = {}
        self._walk("captured", function, 0)

    def of(self, tensor: Tensor) -> str:
        """The name of ``tensor``, or of the tensor that it is a view of; "captured" where there is none."""
        base = tensor._base
        name = self._names.get(id(tensor)) or (self._names.get(id(base)) if base is not None else None)
        return name or "captured"

    def _walk(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, _PLAIN) or value is None or id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._names[id(value)] = name
            return
        for part_name, part in _parts(name, value):
            self._walk(part_name, part, depth + 1)


def _parts(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, FunctionType):
        yield from _reached(value)
    elif isinstance(value, MethodType):
        yield from ((name, value.__func__), (name, value.__self__))
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name}_{i}", part) for i, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from ((f"{name}_{key}", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}_{i}", part) for i, part in enumerate(value))
    else:
        if callable(value) and isinstance(call := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004
            yield name, call
        members = getattr(value, "__dict__", {})
        for group in ("_parameters", "_buffers"):  # of a torch module, whose attributes they are
            yield from members.get(group, {}).items()
        yield from members.items()


def _reached(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    if hasattr(function, "__wrapped__"):
        yield function.__name__, function.__wrapped__


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class Source:
    """A tensor that hooks read: a declared parameter (or number), or a captured tensor that becomes one.

    A dimension that is indexed by a head or the request as such is checked before the kernel runs. Any other index is
    checked in the kernel, where one that lies outside reads NaN, 0 or false: torch's IndexError cannot be raised there.
    """

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int | str | None, ...], held: Tensor | None) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.held = held
        self._loads: list[tuple[Node, ...]] = []

    @property
    def _lies_as(self) -> torch.dtype:
        """Its type in memory: one that a parameter may have."""
        return torch.int32 if self.dtype in (torch.int8, torch.int16) else self.dtype

    @property
    def param(self) -> Param:
        """Its declaration."""
        sizes: list[int | str | None] = [self._least(dim) for dim in range(len(self.shape))]
        if self.held is not None and self.held.ndim == 0:
            sizes = [1]
        return Param(self.name, self._lies_as, tuple(sizes))

    @property
    def capture(self) -> Tensor | None:
        """Its value, as a kernel takes it; None where run() gives it."""
        if self.held is None:
            return None
        tensor = self.held.detach().to(self._lies_as).resolve_neg()  # x.imag may be a view with the sign still to turn
        return tensor.reshape(1) if tensor.ndim == 0 else tensor

    def load(self, g: Graph, indices: tuple[Operand, ...]) -> Node:
        """The element at ``indices``, one for each dimension."""
        nodes = tuple(self._index(g, dim, index) for dim, index in enumerate(indices))
        self._loads.append(nodes)
        inline = self.held is None and not nodes
        # What run() is given instead of an int8 tensor is int32 and may hold more.
        return wrapped(g, g.operation(self._read, nodes, self._lies_as, inline=inline), self.dtype)

    def _index(self, g: Graph, dim: int, index: Operand) -> Node:
        if isinstance(index, bool | float) or (isinstance(index, Node) and not index.is_int):
            raise untranslatable(f"{self.name} is indexed by a value that is no integer", "`x.int()` or a comparison")
        if isinstance(index, Node) and index.dtype == torch.uint8:
            raise untranslatable(f"{self.name} is indexed by uint8, which torch takes for a mask", "`x.int()`")
        node = as_type(g, index, torch.int64)
        size = self.shape[dim]
        if isinstance(size, int) and (node.low >= size or node.high < -size):
            if size == 0:
                raise untranslatable(
                    f"{self.name} has no elements: dimension {dim} has size 0", "it with a tensor that has some"
                )
            where = index if isinstance(index, int) else f"{node.low} to {node.high}"
            raise untranslatable(
                f"index {where} is out of range for dimension {dim} of {self.name}, which has size {size}",
                f"an index from {-size} to {size - 1}",
            )
        return node

    def _least(self, dim: int) -> str | None:
        """What the dimension holds at least, if that is what its index counts up to: then the index needs no check."""
        leaves = {nodes[dim].text if not nodes[dim].args else None for nodes in self._loads}
        symbol = _COUNTED.get(leaves.pop()) if len(leaves) == 1 else None
        if symbol is None or (self.held is None and self.shape[dim] not in (symbol, f">={symbol}")):
            return None
        return f">={symbol}"

    def _read(self, args: tuple[str, ...]) -> str:
        name = f"params.{self.name}"
        if not args:
            return name if self.held is None else f"{name}[0]"
        if any(self._least(dim) is None for dim in range(len(args))):
            return f"{name}.at({', '.join(args)})"
        return f"{name}[{args[0]}]" if len(args) == 1 else f"{name}({', '.join(args)})"


_COUNTED: dict[object, str] = {
    "q_head": "num_qo_heads",
    "kv_head": "num_kv_heads",
    "request": "num_requests",
}
"""What an index counts up to."""


def captured(name: str, tensor: Tensor) -> Source:
    """A captured tensor as a source; the name is made a valid one.

    Raises:
        TraceError: its type has no place in a kernel, or it is not numbers that lie in memory at strides.
    """
    if (kind := _unreadable(tensor)) is not None:
        raise untranslatable(
            f"{name} is {kind}, whose elements no kernel can read",
            "a plain dense tensor: `.to_dense()`, `.dequantize()` or one that holds numbers, made outside the hook",
        )
    dtype = STORED.get(tensor.dtype, tensor.dtype)
    if dtype not in RANK:
        raise untranslatable(f"{name} is a tensor of {tensor.dtype}", f"one of {', '.join(map(str, [*RANK, *STORED]))}")
    return Source(identifier(name), dtype, tuple(tensor.shape), tensor)


def _unreadable(tensor: Tensor) -> str | None:
    """What it is instead of elements that lie in memory at strides, which is all that a kernel can read."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    if tensor.is_meta:
        return "a meta tensor"
    # FakeTensor and its like say how they look, and leave it to Python what they hold.
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}"
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # inside torch.vmap
        return "a tensor without storage"
    return None


def identifier(name: str) -> str:
    """``name`` with everything replaced that the name of a parameter cannot hold, or one near it that may be one."""
    text = re.sub(r"\W|[^\x00-\x7f]", "_", name).strip("_")[:48] or "captured"
    if not text[0].isalpha():
        text = f"x{text}"
    return next((one for one in (text, f"{text}_") if _may_name(one)), f"captured_{text}")


def _may_name(text: str) -> bool:
    """Whether it can be the name of a parameter, and of an argument in Python, where it may be given by name."""
    try:
        Param(text)
    except ValueError:
        return False
    return not keyword.iskeyword(text)
