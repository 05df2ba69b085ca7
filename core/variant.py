"""Variants: the attention a model computes, as hooks that are compiled into a kernel.

The seven hooks are those of FlashInfer's attention variants (arXiv 2501.01005, section 3.2.3). A hook is the body of a
C++ function in the dialect of csrc/common (`return ...;`), which compiles for every kernel family from the same text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_CPP_TYPES = {
    torch.float32: "float",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
_SYMBOLS = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "num_requests")

Hook = str | tuple[str, ...]
"""The text of a hook; a composed variant holds several, in the order in which they act."""


@dataclass(frozen=True)
class Param:
    """A run-time parameter of a variant: hooks read it as ``params.name``.

    Attributes:
        name: identifier.
        dtype: of a tensor float32, int32, int64, uint8 or bool; of a scalar float32 or int64.
        shape: () is a scalar; otherwise one entry per dimension: a size, one of num_qo_heads, num_kv_heads, head_dim,
            head_dim_v, num_requests, or None for any size. Hooks read ``params.t[i]`` or ``params.t(i, j)``.
    """

    name: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int | str | None, ...] = ()

    def __post_init__(self) -> None:
        if not _IDENTIFIER.fullmatch(self.name):
            raise ValueError(f"Param.name={self.name!r}: expected an identifier")
        allowed = (torch.float32, torch.int64) if self.scalar else tuple(_CPP_TYPES)
        if self.dtype not in allowed:
            raise ValueError(f"Param.dtype={self.dtype} of {self.name}: expected one of {allowed}")
        for size in self.shape:
            if isinstance(size, str) and size not in _SYMBOLS:
                raise ValueError(f"Param.shape={self.shape} of {self.name}: expected sizes, None or {_SYMBOLS}")

    @property
    def scalar(self) -> bool:
        """Whether it is a number and not a tensor."""
        return not self.shape

    @property
    def words(self) -> int:
        """64-bit words it takes on its way to a kernel: the value, or the address and the strides."""
        return 1 + len(self.shape)

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

    Names in every hook: ``params``, and the ints ``request``, ``q_pos``, ``kv_pos`` (logical positions), ``q_head``,
    ``kv_head``, ``q_index``, ``kv_index`` (query and slot counted inside the request). Functions: exp, exp2, log,
    log2, tanh, sigmoid, sqrt, sin, cos, pow, abs, min, max, floor, where, packed_bit.

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
        captures: values of parameters that need not be given to run(), as the tensors that a traced function captured.
        left, right: a query at position p sees keys at positions p - left to p + right; None: unlimited. They are not
            compiled in: variants that differ in them alone share a kernel.
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
    captures: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    kernel_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not _IDENTIFIER.fullmatch(self.name):
            raise ValueError(f"Variant.name={self.name!r}: expected an identifier")
        for hook in HOOKS:
            text = getattr(self, hook)
            if isinstance(text, str):
                object.__setattr__(self, hook, (text,))
        for bound in ("left", "right"):
            value = getattr(self, bound)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"Variant.{bound}={value!r} of {self.name}: expected None or an int of at least 0")
        names = [param.name for param in self.params]
        if len(set(names)) != len(names):
            raise ValueError(f"Variant.params of {self.name}: expected distinct names, got {names}")
        unknown = [name for name in self.captures if name not in names]
        if unknown:
            raise ValueError(f"Variant.captures={unknown} of {self.name}: expected names of params, {names}")
        if len(self.sink) > 1:
            raise ValueError(f"Variant.sink of {self.name}: expected one sink, got {len(self.sink)}")
        if self.sink and not self.use_softmax:
            raise ValueError(f"Variant.sink of {self.name}: a sink joins the softmax's sum, and use_softmax is False")
        if not self.kernel_names and (self.params or not self.use_softmax or any(getattr(self, h) for h in HOOKS)):
            object.__setattr__(self, "kernel_names", (self.name,))

    def __and__(self, other: Variant) -> Variant:
        if not isinstance(other, Variant):
            return NotImplemented
        params = {param.name: param for param in self.params}
        for param in other.params:
            first = params.setdefault(param.name, param)
            if first != param:
                raise ValueError(
                    f"{self.name} & {other.name}: parameter {param.name!r} is declared as {first} and {param}"
                )
        for variant in (self, other):
            rest = other if variant is self else self
            if variant.sink and not rest.use_softmax:
                raise ValueError(
                    f"{self.name} & {other.name}: the sink of {variant.name} joins the softmax's sum, "
                    f"and {rest.name} uses none"
                )
        for capture in self.captures.keys() & other.captures.keys():
            if self.captures[capture] is not other.captures[capture]:
                raise ValueError(f"{self.name} & {other.name}: parameter {capture!r} is captured as two tensors")
        if self.sink and other.sink:
            raise ValueError(f"{self.name} & {other.name}: both have a sink, expected one")
        hooks = {hook: getattr(self, hook) + getattr(other, hook) for hook in HOOKS}
        if any(variant.logits_mask and not variant.mask_free for variant in (self, other)):
            hooks["mask_free"] = ()  # one of the masks may hide any key
        return Variant(
            name=f"{self.name}_{other.name}"[:64],
            params=tuple(params.values()),
            use_softmax=self.use_softmax and other.use_softmax,
            left=_narrower(self.left, other.left),
            right=_narrower(self.right, other.right),
            captures={**self.captures, **other.captures},
            kernel_names=self.kernel_names + other.kernel_names,
            **hooks,
        )

    @property
    def kernel_name(self) -> str:
        """Names the compiled part: variants that differ in their band share a kernel."""
        return "_".join(self.kernel_names) or "plain"


HOOKS = tuple(f.name for f in fields(Variant) if f.type == "Hook")


def _narrower(a: int | None, b: int | None) -> int | None:
    bounds = [bound for bound in (a, b) if bound is not None]
    return min(bounds) if bounds else None
