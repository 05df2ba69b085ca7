"""What a traced function is given: objects that look like torch's numbers and write down what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from attnloom.core.trace.errors import branched, untranslatable
from attnloom.core.trace.graph import Node
from attnloom.core.trace.types import Operand

if TYPE_CHECKING:
    from attnloom.core.trace.captures import Source


class Recorder(Protocol):
    """What values need of the tracer."""

    def call(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """The result of torch's function ``name``."""

    def dispatch(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """The result of a call that reached torch."""

    def operand(self, value: object) -> Operand:
        """An argument as operations take it."""

    def load(self, source: Source, indices: tuple[Operand, ...]) -> Value:
        """An element of a tensor."""

    def element(self, node: Node) -> Value:
        """A value of its own."""


class Traced:
    """Base of everything that stands for what only the kernel knows."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Where torch's own functions arrive."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, Traced):
                return value._recorder.dispatch(function, args, kwargs or {})
        return NotImplemented

    def __iter__(self) -> NoReturn:
        raise untranslatable("a traced value cannot be iterated over", "out each element, with its index")

    def __len__(self) -> NoReturn:
        raise untranslatable("a traced value has no length", "the number itself")


class Value(Traced):
    """A number, as torch would have it in a tensor without dimensions: float32, an integer type, or bool."""

    shape = torch.Size(())
    ndim = 0
    device = torch.device("cpu")
    requires_grad = False

    def __init__(self, recorder: Recorder, node: Node) -> None:
        super().__init__(recorder)
        self.node = node

    def __repr__(self) -> str:
        return f"Value({self.node.text}, {self.node.dtype})"

    @property
    def dtype(self) -> torch.dtype:
        """As torch has it."""
        return self.node.dtype

    def dim(self) -> int:
        """Number of dimensions."""
        return 0

    def size(self) -> torch.Size:
        """Sizes of its dimensions."""
        return self.shape

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> NoReturn:
        raise branched()

    def _as_number(self) -> NoReturn:
        raise untranslatable(
            "a traced value is no Python number: the kernel computes it",
            "torch's functions instead of math's, and torch.tensor(list)[i] instead of list[i]",
        )

    __int__ = __float__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = _as_number
    item = tolist = numpy = __array__ = _as_number

    def where(self, condition: object, other: object) -> object:
        """As Tensor.where."""
        return self._recorder.call("where", (condition, self, other), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        recorder = self.__dict__["_recorder"]
        return lambda *args, **kwargs: recorder.call(name, (self, *args), kwargs)

    def __getitem__(self, index: object) -> NoReturn:
        raise untranslatable("a traced value is a single number and cannot be indexed", "the value itself")


class Element(Traced):
    """A captured tensor, some dimensions of which have been indexed."""

    def __init__(self, recorder: Recorder, source: Source, indices: tuple[Operand, ...]) -> None:
        super().__init__(recorder)
        self._source = source
        self._indices = indices

    def __getitem__(self, index: object) -> Element | Value:
        return index_tensor(self._recorder, self._source, self._indices, index)

    def __repr__(self) -> str:
        return f"{self._source.name} with {len(self._indices)} of {len(self._source.shape)} dimensions indexed"


class Vector(Traced):
    """The row that a vector hook transforms: ``query[dim]``."""

    def __init__(self, recorder: Recorder, read: Callable[[Operand], Node]) -> None:
        super().__init__(recorder)
        self._read = read

    def __getitem__(self, index: object) -> Value:
        return self._recorder.element(self._read(self._recorder.operand(index)))

    def __bool__(self) -> NoReturn:
        raise branched()


class Params:
    """``params`` in a hook: the declared parameters by name."""

    def __init__(self, recorder: Recorder, sources: Mapping[str, Source]) -> None:
        self._recorder = recorder
        self._sources = sources

    def __getattr__(self, name: str) -> object:
        source = self._sources.get(name)
        if source is None:
            raise untranslatable(
                f"params has no {name!r}",
                f"one of {sorted(self._sources)}, or declare it: Variant(..., (Param({name!r}),))",
            )
        return index_tensor(self._recorder, source, (), ())


def index_tensor(recorder: Recorder, source: Source, done: tuple[Operand, ...], index: object) -> Element | Value:
    """``tensor[index]``: a number once every dimension has its index."""
    given = index if isinstance(index, tuple) else (index,)
    for one in given:
        if one is None or isinstance(one, slice | list) or one is Ellipsis:
            raise untranslatable(
                f"{source.name} is indexed by {one!r}; in a kernel every dimension takes one number",
                "one index for each dimension",
            )
    indices = (*done, *(recorder.operand(one) for one in given))
    if len(indices) > len(source.shape):
        raise untranslatable(
            f"too many indices for {source.name}: it has {len(source.shape)} dimensions, {len(indices)} were given",
            "one index for each dimension",
        )
    if len(indices) < len(source.shape):
        return Element(recorder, source, indices)
    return recorder.load(source, indices)


BINARY = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY = {"neg": "neg", "pos": "positive", "abs": "abs", "invert": "bitwise_not"}
"""Python's operators and torch's names for them."""


def _operator(name: str, *, reflected: bool = False) -> Callable[[Value, object], object]:
    def apply(self: Value, other: object) -> object:
        return self._recorder.call(name, (other, self) if reflected else (self, other), {})

    return apply


def _unary(name: str) -> Callable[[Value], object]:
    return lambda self: self._recorder.call(name, (self,), {})


for _name, _operation in BINARY.items():
    setattr(Value, f"__{_name}__", _operator(_operation))
    setattr(Value, f"__r{_name}__", _operator(_operation, reflected=True))
for _name in COMPARISONS:
    setattr(Value, f"__{_name}__", _operator(_name))
for _name, _operation in UNARY.items():
    setattr(Value, f"__{_name}__", _unary(_operation))
