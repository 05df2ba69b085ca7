"""Variants: the attention a model computes, as hooks that are compiled into a kernel.

The seven hooks are those of FlashInfer's attention variants (arXiv 2501.01005, section 3.2.3). A hook is the body of a
C++ function in the dialect of csrc/common (`return ...;`), which compiles for every kernel family from the same text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from attnloom.core.hook_text import check_whole, code_of

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_CPP_TYPES = {
    torch.float32: "float",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
SYMBOLS = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "num_requests", "head_dim/2")
"""Sizes that a parameter's shape may name."""

CPP_KEYWORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t class
    co_await co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int
    long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename typeof union unsigned using virtual void volatile
    wchar_t while xor xor_eq
    """.split()  # noqa: SIM905  it reads as a list of words
)
"""What is no name in C++, up to C++20: compilers and hooks' texts may go ahead of the C++17 of kernels."""

TAKEN_NAMES = frozenset(
    """
    CHAR_BIT EOF EXIT_FAILURE EXIT_SUCCESS HookParams HUGE_VAL HUGE_VALF HUGE_VALL INFINITY NAN NULL RAND_MAX SIZE_MAX
    assert attnloom errno int32_t int64_t math_errhandling offsetof stderr stdin stdout uint32_t uint64_t uint8_t
    """.split()  # noqa: SIM905
)
"""What a kernel's declaration of the parameters uses itself, and macros of the headers that it includes."""

# Reserved to compilers, the macros of headers by families, and those of csrc.
_RESERVED = re.compile(
    r"__\w*|_[A-Z]\w*|ATTNLOOM_\w*|M_[A-Z0-9_]+|FP_[A-Z0-9_]+|MATH_[A-Z0-9_]+"
    r"|U?(?:INT|CHAR|SHRT|LONG|LLONG)[A-Z0-9_]*_(?:MIN|MAX|C|WIDTH)|(?:S?CHAR|WCHAR|WINT|PTRDIFF|SIG_ATOMIC)_(?:MIN|MAX)"
    r"|(?:FLT|DBL|LDBL|DECIMAL)_[A-Z0-9_]+"
)


def is_param_name(name: str) -> bool:
    """Whether a kernel can declare a parameter of this name."""
    return (
        _IDENTIFIER.fullmatch(name) is not None
        and name not in CPP_KEYWORDS
        and name not in TAKEN_NAMES
        and _RESERVED.fullmatch(name) is None
    )


Hook = str | tuple[str, ...] | Callable[..., object]
"""A hook as it is given: C++ text, or a Python function. A variant holds texts, in the order in which they act."""

_FARTHEST = 2**31 - 1
"""No two positions lie so far apart: those of keys are below 2**30, and a query stands no further before the first."""

_IDENTITIES = ("return logits;", "return query[dim];", "return key[dim];", "return value[dim];", "return output[dim];")


@dataclass(frozen=True)
class Param:
    """A run-time parameter of a variant: hooks read it as ``params.name``.

    Attributes:
        name: identifier.
        dtype: of a tensor float32, int32, int64, uint8 or bool; of a scalar float32 or int64.
        shape: () is a scalar; otherwise one entry per dimension: a size, one of num_qo_heads, num_kv_heads, head_dim,
            head_dim/2, head_dim_v, num_requests; ">=" or "<=" and one of these for at least or at most as many; or None
            for any size. Hooks read
            ``params.t[i]`` or ``params.t(i, j)``, which trust the index, or ``params.t.at(i, j)``, which takes negative
            ones as torch does and reads NaN, 0 or false outside; ``params.t.size(dim)`` is a size.
        above: of a scalar: its values are finite and larger than this. None: any number.
        fixed: it has the value that the variant was made with, and run() cannot give another.
    """

    name: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int | str | None, ...] = ()
    above: float | None = field(default=None, compare=False)
    fixed: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Param.name={self.name!r}: expected an identifier")
        if not is_param_name(self.name):
            raise ValueError(
                f"Param.name={self.name!r}: expected an identifier that is no keyword, macro or reserved name of C++"
            )
        if not isinstance(self.shape, tuple):
            raise TypeError(f"Param.shape={self.shape!r} of {self.name}: expected a tuple, () for a scalar")
        allowed = (torch.float32, torch.int64) if self.scalar else tuple(_CPP_TYPES)
        if self.dtype not in allowed:
            raise ValueError(f"Param.dtype={self.dtype} of {self.name}: expected one of {allowed}")
        for size in self.shape:
            named = isinstance(size, str) and size.removeprefix(">=").removeprefix("<=") in SYMBOLS
            if not (named or size is None or (type(size) is int and size >= 0)):
                raise ValueError(f"Param.shape={self.shape} of {self.name}: expected sizes, None or {SYMBOLS}")

    @property
    def scalar(self) -> bool:
        """Whether it is a number and not a tensor."""
        return not self.shape

    @property
    def words(self) -> int:
        """64-bit words it takes on its way to a kernel: the value, or the address, the strides and the sizes."""
        return 1 + 2 * len(self.shape)

    @property
    def cpp_type(self) -> str:
        """Its type in the kernel."""
        kind = _CPP_TYPES[self.dtype]
        return kind if self.scalar else f"attnloom::TensorParam<{kind}, {len(self.shape)}>"

    @property
    def cpp_read(self) -> str:
        """What makes it from its words."""
        if self.scalar:
            return "attnloom::float_param" if self.dtype == torch.float32 else "attnloom::int_param"
        return self.cpp_type


@dataclass(frozen=True)
class Variant:
    """An attention variant. Compose variants with ``&``; hooks then act left to right, masks and bands intersect.

    A hook is C++ text (``return ...;``) or a Python function, which is called once on stand-ins and translated
    (core/trace). A function takes what it needs by the names below; logits_transform and logits_mask also take
    FlexAttention's ``(score, b, h, q_idx, kv_idx)`` and ``(b, h, q_idx, kv_idx)`` by position.

    Names in every hook: ``params``, and the ints ``request``, ``q_pos``, ``kv_pos`` (logical positions, below 2**30),
    ``q_head``, ``kv_head``, ``q_index``, ``kv_index`` (query and slot counted inside the request), ``head_dim``,
    ``head_dim_v``. Functions: those of csrc/common/math.h, which has exp, log, tanh, sigmoid, min, max, where and more.

    Attributes:
        name: identifier; names of kernels with hooks contain it.
        params: what the hooks read.
        query_transform: over ``query`` (indexable by any dimension: ``query[dim ^ 1]`` is the rotary partner), ``dim``.
        key_transform, value_transform: over ``key`` or ``value`` and ``dim``; no query index here.
        logits_transform: over ``logits``, the scaled product.
        logits_mask: true where the key is visible.
        output_transform: over ``output`` and ``dim``, acts once on the finished row, after the sink.
        sink: a logit per query head that joins the softmax's sum and has no value; acts once, after the last merge.
        visible: the range of keys that some query of a tile sees, over ``q_first``, ``q_last`` (positions of its first
            and last query), ``kv_len`` and ``request``: ``return Range{begin, end};``. Nothing outside is computed or
            read; logits_mask must hide it.
        mask_free: likewise the range that logits_mask leaves to every query of the tile: it is not evaluated inside.
        use_softmax: False: the transformed logits are the weights and nothing is normalised.
        captures: values of parameters that need not be given to run(): what a catalogue entry was made with, and the
            tensors that a Python function captured (those of another type than Param.dtype as float32 copies).
        left, right: a query at position p sees keys at positions p - left to p + right; None: unlimited, and what
            reaches over 2**31 - 1 positions or more becomes None, since no two lie so far apart. They are not compiled
            in: variants that differ in them alone share a kernel.
    """

    name: str
    params: tuple[Param, ...] = ()
    query_transform: Hook = ()
    key_transform: Hook = ()
    value_transform: Hook = ()
    logits_transform: Hook = ()
    logits_mask: Hook = ()
    output_transform: Hook = ()
    sink: Hook = ()
    visible: Hook = ()
    mask_free: Hook = ()
    use_softmax: bool = True
    left: int | None = None
    right: int | None = None
    captures: Mapping[str, Tensor | float | int] = field(default_factory=dict, compare=False, repr=False)
    kernel_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _IDENTIFIER.fullmatch(self.name):
            raise ValueError(f"Variant.name={self.name!r}: expected an identifier")
        if not isinstance(self.params, tuple) or not all(isinstance(param, Param) for param in self.params):
            raise TypeError(f"Variant.params={self.params!r} of {self.name}: expected a tuple of Param")
        if not isinstance(self.use_softmax, bool):
            raise TypeError(f"Variant.use_softmax={self.use_softmax!r} of {self.name}: expected a bool")
        for hook in HOOKS:
            given = getattr(self, hook)
            if callable(given) and hook not in ("visible", "mask_free"):
                self._translate(hook, given)
            elif isinstance(given, str):
                placed = given if given.lstrip().startswith("#line") else f'#line 1 "{self.name}.{hook}"\n{given}'
                check_whole(placed, f"Variant.{hook} of {self.name}")
                object.__setattr__(self, hook, () if _is_identity(hook, given) else (placed,))
            elif not isinstance(given, tuple) or not all(isinstance(text, str) for text in given):
                kind = "C++ text" if hook in ("visible", "mask_free") else "C++ text or a Python function"
                raise TypeError(f"Variant.{hook}={given!r} of {self.name}: expected {kind}")
            else:
                for text in given:
                    check_whole(text, f"Variant.{hook} of {self.name}")
        for bound in ("left", "right"):
            value = getattr(self, bound)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"Variant.{bound}={value!r} of {self.name}: expected None or an int of at least 0")
            if value is not None and value >= _FARTHEST:
                object.__setattr__(self, bound, None)
        names = [param.name for param in self.params]
        if len(set(names)) != len(names):
            raise ValueError(f"Variant.params of {self.name}: expected distinct names, got {names}")
        unknown = [name for name in self.captures if name not in names]
        if unknown:
            raise ValueError(f"Variant.captures={unknown} of {self.name}: expected names of params, {names}")
        for name, value in self.captures.items():
            if isinstance(value, bool) or not isinstance(value, Tensor | float | int):
                raise TypeError(f"Variant.captures[{name!r}]={value!r} of {self.name}: expected a number or a tensor")
        if len(self.texts("sink")) > 1:
            raise ValueError(f"Variant.sink of {self.name}: expected one sink, got {len(self.texts('sink'))}")
        if self.sink and not self.use_softmax:
            raise ValueError(f"Variant.sink of {self.name}: a sink joins the softmax's sum, and use_softmax is False")
        if not self.kernel_names and (self.params or not self.use_softmax or any(getattr(self, h) for h in HOOKS)):
            object.__setattr__(self, "kernel_names", (self.name,))

    def _translate(self, hook: str, function: Callable[..., object]) -> None:
        """Replace a function by its C++, and declare the tensors that it captures."""
        # Imported late: a program whose hooks are all C++ needs no tracer.
        from attnloom.core.trace.tracer import trace

        traced = trace(hook, function, self.params)
        object.__setattr__(self, hook, () if traced.text is None else (traced.text,))
        object.__setattr__(self, "params", (*self.params, *traced.params))
        object.__setattr__(self, "captures", {**self.captures, **traced.captures})

    def __and__(self, other: Variant) -> Variant:
        if not isinstance(other, Variant):
            return NotImplemented
        from attnloom.core.compose import compose

        return compose(self, other)

    def __eq__(self, other: object) -> bool:
        """Whether both compute the same with the same values: captures count, tensors by where they lie."""
        if not isinstance(other, Variant):
            return NotImplemented
        return (
            all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.compare)
            and self.captures.keys() == other.captures.keys()
            and all(same_value(value, other.captures[name]) for name, value in self.captures.items())
        )

    def texts(self, hook: str) -> tuple[str, ...]:
        """The C++ of a hook, in the order in which it acts."""
        texts: tuple[str, ...] = getattr(self, hook)
        return texts

    @functools.cached_property
    def masks_by_position(self) -> bool:
        """Whether logits_mask depends on positions, heads and numbers alone: on nothing that changes between steps.

        A tensor may get another content, a request another place in the batch, a query another index.
        """
        tensors = {param.name for param in self.params if not param.scalar}
        bodies = [code_of(text) for text in self.texts("logits_mask")]
        return bool(bodies) and not any(
            re.search(r"\b(request|q_index|kv_index)\b|\bparams\b(?!\s*\.)", body)
            or tensors & set(re.findall(r"\bparams\s*\.\s*(\w+)", body))
            for body in bodies
        )

    @property
    def kernel_name(self) -> str:
        """Names the compiled part: variants that differ in their band share a kernel."""
        return "_".join(self.kernel_names) or "plain"


HOOKS = tuple(f.name for f in fields(Variant) if f.type == "Hook")


def same_value(one: Tensor | float, other: Tensor | float) -> bool:
    """Whether two values of a parameter are one number, or one piece of memory seen alike."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return _seen(one) == _seen(other)
    return one == other


def _seen(value: Tensor | float) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride()


def _is_identity(hook: str, text: str) -> bool:
    return text.strip() == "return true;" if hook == "logits_mask" else text.strip() in _IDENTITIES
