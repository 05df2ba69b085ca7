"""Traces a hook: calls the Python function once on stand-ins and writes down, as C++, what it does with them.

No graph of torch's is made: a mode of torch.overrides sees every call that reaches torch, captured tensors included,
and operators of the stand-ins see the rest. It takes about a millisecond, so a kernel in the cache is found at once.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnloom.core.errors import AttnloomError
from attnloom.core.trace import arithmetic, functions  # noqa: F401  they fill the table
from attnloom.core.trace.captures import Names, Source, captured
from attnloom.core.trace.dialect import ELEMENT, FLEX, RESULT, index_leaf, names_of
from attnloom.core.trace.errors import failed_in_torch, untranslatable, untranslatable_function
from attnloom.core.trace.functions import STORED
from attnloom.core.trace.graph import RANK, Graph, Node
from attnloom.core.trace.table import OPERATIONS, Operation
from attnloom.core.trace.types import Operand, as_type
from attnloom.core.trace.value import BINARY, COMPARISONS, UNARY, Params, Traced, Value, Vector, index_tensor
from attnloom.core.variant import Param


@dataclass(frozen=True)
class TracedHook:
    """A hook as C++.

    Attributes:
        text: the body of the hook; None: the hook is the identity, or a mask that hides nothing.
        params: captured tensors, declared.
        captures: their values.
    """

    text: str | None
    params: tuple[Param, ...] = ()
    captures: Mapping[str, Tensor] = field(default_factory=dict)


def trace(
    hook: str, function: Callable[..., object], declared: Sequence[Param] = (), *, flex: bool | None = None
) -> TracedHook:
    """Translate one hook.

    Args:
        hook: its name, e.g. ``logits_transform``.
        function: takes arguments named as in the dialect, or, for logits_transform and logits_mask, the positional
            ``(score, b, h, q_idx, kv_idx)`` and ``(b, h, q_idx, kv_idx)`` of FlexAttention.
        declared: parameters of the variant, which the function sees as ``params``; captured tensors get other names.
        flex: whether the arguments are FlexAttention's; None: if they do not have names of the dialect.

    Raises:
        TraceError: what the function does, takes or returns has no translation.
    """
    return _Tracer(hook, function, declared).run(flex)


class _Tracer:
    """One trace; the recorder that values talk to."""

    def __init__(self, hook: str, function: Callable[..., object], declared: Sequence[Param]) -> None:
        self._hook = hook
        self._function = function
        self._graph = Graph()
        self._declared = {param.name: Source(param.name, param.dtype, param.shape, None) for param in declared}
        self._sources: dict[int, Source] = {}
        self._constants: dict[int, Tensor] = {}
        self._names: Names | None = None
        self._identity: Node | None = None

    def run(self, flex: bool | None) -> TracedHook:
        args, kwargs = self._arguments(flex)
        try:
            with _Mode(self):
                result = self._function(*args, **kwargs)
        except AttnloomError:
            raise
        except Exception as error:  # the function's own ones pass
            if (found := failed_in_torch(error, _holds_traced)) is not None:
                raise found from error
            raise
        node = self._result(result)
        if node is self._identity or (self._hook == "logits_mask" and node.constant is True):
            return TracedHook(None)
        text = self._graph.emit(node)
        read = [source for source in self._sources.values() if re.search(rf"\bparams\.{source.name}\b", text)]
        captures = {source.name: source.capture for source in read}
        return TracedHook(
            text, tuple(source.param for source in read), {k: v for k, v in captures.items() if v is not None}
        )

    def _arguments(self, flex: bool | None) -> tuple[list[object], dict[str, object]]:
        parameters = list(inspect.signature(self._function).parameters.values())
        names = names_of(self._hook)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        wanted = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        needed = [p for p in wanted if p.default is p.empty]
        named = all(p.name in names for p in needed) and all(p.kind != p.VAR_POSITIONAL for p in parameters)
        order = FLEX.get(self._hook)
        if flex is None:
            flex = order is not None and not named
        if flex and order is not None:
            open_ended = any(p.kind == p.VAR_POSITIONAL for p in parameters)
            fits = len(positional) >= len(order) or open_ended
            if not fits or any(p not in positional[: len(order)] for p in needed):
                raise untranslatable_function(
                    f"{self._hook} takes {[p.name for p in parameters]}",
                    f"FlexAttention's {len(order)} arguments ({', '.join(order.values())}), or names of {names}",
                    self._function,
                )
            return [self._stand_in(name) for name in order], {}
        if not named:
            unknown = [p.name for p in needed if p.name not in names]
            raise untranslatable_function(
                f"{self._hook} takes {unknown or 'any number of arguments'}",
                f"arguments named as in {names}",
                self._function,
            )
        args = [self._stand_in(p.name) for p in wanted if p.kind == p.POSITIONAL_ONLY]
        return args, {p.name: self._stand_in(p.name) for p in wanted if p.kind != p.POSITIONAL_ONLY and p.name in names}

    def _stand_in(self, name: str) -> object:
        if name == "params":
            return Params(self, self._declared)
        if name not in ELEMENT.values():
            return Value(self, index_leaf(self._graph, name))
        if name == "logits":
            self._identity = self._graph.leaf("logits", torch.float32)
            return Value(self, self._identity)
        self._identity = self._read_vector(name, index_leaf(self._graph, "dim"))
        return Vector(self, lambda index: self._read_vector(name, index))

    def _read_vector(self, name: str, index: Operand) -> Node:
        if isinstance(index, bool | float) or (isinstance(index, Node) and not index.is_int):
            raise untranslatable(f"{name} is indexed by a value that is no integer", f"{name}[dim] or {name}[dim ^ 1]")
        node = as_type(self._graph, index, torch.int64)
        size = "head_dim_v" if name in ("value", "output") else "head_dim"
        text = f"{name}[{{0}}]" if node.text == "dim" else f"{name}[inside({{0}}, {size})]"
        return self._graph.operation(text, (node,), torch.float32)

    def _result(self, result: object) -> Node:
        kind = RESULT[self._hook]
        if isinstance(result, Value | bool | int | float) or (isinstance(result, Tensor) and result.ndim == 0):
            found = self.operand(result)
            dtype = found.dtype if isinstance(found, Node) else torch.bool if isinstance(found, bool) else torch.float32
            if kind == torch.float32 or dtype == torch.bool:
                return as_type(self._graph, found, kind)
        got = f"a value of {result.dtype}" if isinstance(result, Value) else repr(result)
        wanted = "a bool, such as `q_idx >= kv_idx`" if kind == torch.bool else "a number"
        raise untranslatable_function(
            f"{self._hook} returns {got}", f"a function that returns {wanted}", self._function
        )

    def call(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Value:
        operation = OPERATIONS.get(name)
        if operation is None:
            raise untranslatable(
                f"{name} has no translation",
                f"it with the functions that have one: {', '.join(n for n in sorted(OPERATIONS) if n[0] != '_')}",
            )
        words = name in ("to", "type")  # which a device's name may follow
        operands = [arg if words and isinstance(arg, str) else self._argument(arg) for arg in args]
        named = {
            key: value if isinstance(value, str) and (words or key in _WORDS) else self._argument(value)
            for key, value in kwargs.items()
            if key != "out" or value is not None
        }
        try:
            _signature(operation).bind(self._graph, *operands, **named)
        except TypeError as error:
            raise untranslatable(
                f"{name}: {error}", f"{name} with the arguments of torch's element-wise function"
            ) from None
        return Value(self, operation(self._graph, *operands, **named))

    def _argument(self, value: object) -> object:
        """Numbers become operands; a type or a shape stays what it is."""
        return value if value is None or isinstance(value, _PLAIN) else self.operand(value)

    def operand(self, value: object) -> Operand:
        if isinstance(value, Value):
            return value.node
        if isinstance(value, bool | int | float):
            return value
        if isinstance(value, Tensor):
            return self._number(value)
        if isinstance(value, Traced):
            raise untranslatable(f"{value!r} is no number yet", "one index for each dimension")
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            return self.operand(value.item())  # type: ignore[attr-defined]
        raise untranslatable(
            f"a value of type {type(value).__name__} meets a traced one",
            "a number, or a torch tensor indexed down to one",
        )

    def _number(self, tensor: Tensor) -> Operand:
        if tensor.ndim:
            name = self._source(tensor).name
            raise untranslatable(
                f"{name}, a tensor of shape {tuple(tensor.shape)}, is used as a whole; a hook computes one number",
                f"`{name}[...]` with one index for each dimension",
            )
        if id(tensor) in self._constants:
            dtype = STORED.get(tensor.dtype, tensor.dtype)
            if dtype in RANK:
                return as_type(self._graph, tensor.item(), dtype)
        return self._source(tensor).load(self._graph, ())

    def _source(self, tensor: Tensor) -> Source:
        found = self._sources.get(id(tensor))
        if found is None:
            if self._names is None:
                self._names = Names(self._function)
            found = captured(self._names.of(tensor), tensor)
            taken = {source.name for source in self._sources.values()} | set(self._declared)
            found.name = unused(found.name, taken)
            self._sources[id(tensor)] = found
        return found

    def load(self, source: Source, indices: tuple[Operand, ...]) -> Value:
        return Value(self, source.load(self._graph, indices))

    def element(self, node: Node) -> Value:
        return Value(self, node)

    def dispatch(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        name = getattr(function, "__name__", str(function)).removeprefix("special_")
        name, reflected = _OPERATORS.get(name, (name, False))
        args = args[::-1] if reflected else args
        inputs = list(_flattened((args, kwargs)))
        if not any(isinstance(value, Traced) for value in inputs) and not self._is_live(name, args, inputs):
            return self._run_now(function, args[::-1] if reflected else args, kwargs)
        if name == "__getitem__" and isinstance(args[0], Tensor):
            return index_tensor(self, self._source(args[0]), (), args[1])
        if name == "where" and function is Tensor.where:
            args = (args[1], args[0], *args[2:])
        if name == "tensor":
            raise untranslatable("torch.tensor of a traced value", "the value itself")
        return self.call(name, args, kwargs)

    def _is_live(self, name: str, args: Sequence[object], inputs: Sequence[object]) -> bool:
        """Whether captured numbers are computed with, which is left to the kernel: they may change between runs."""
        tensors = [value for value in inputs if isinstance(value, Tensor) and id(value) not in self._constants]
        if not tensors:
            return False
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return all(type(one) is int for one in index) and len(index) == tensors[0].ndim
        return name in OPERATIONS and all(not tensor.ndim for tensor in tensors)

    def _run_now(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """A call that no traced value takes part in: torch computes it. What is made of numbers alone is a constant."""
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            inputs = [value for value in _flattened((args, kwargs)) if isinstance(value, Tensor)]
            if all(id(value) in self._constants for value in inputs):
                self._constants[id(result)] = result
        return result


_WORDS = ("device", "rounding_mode")
"""Arguments that may be text."""

_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, tuple, list)

# Operators that begin with a tensor arrive under the names of Python's methods.
_OPERATORS = {
    **{f"__{name}__": (name, False) for name in COMPARISONS},
    **{f"__{name}__": (operation, False) for name, operation in (BINARY | UNARY).items()},
    **{f"__r{name}__": (operation, True) for name, operation in (BINARY | {"div": "div"}).items()},
}


class _Mode(TorchFunctionMode):
    """Sends every call that reaches torch to the tracer."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return self._tracer.dispatch(function, args, kwargs or {})


def unused(name: str, taken: Mapping[str, object] | set[str]) -> str:
    """``name``, or the first of name_2, name_3, ... that is not taken."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


@functools.cache
def _signature(operation: Operation) -> inspect.Signature:
    return inspect.signature(operation)


def _holds_traced(value: object) -> bool:
    return any(isinstance(part, Traced) for part in _flattened(value))


def _flattened(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flattened(part)
    elif isinstance(value, Mapping):
        yield from _flattened(tuple(value.values()))
    else:
        yield value
