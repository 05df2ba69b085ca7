"""Run-time parameters of a variant: from a dict of numbers and tensors to the words a kernel reads."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attnloom.core.checks import check_stored, check_tensor
from attnloom.core.variant import Param, same_value

Value = float | int | Tensor

_SIGNS: dict[str, tuple[Callable[[int, int], bool], str]] = {
    "==": (operator.eq, ""),
    ">=": (operator.ge, "at least "),
    "<=": (operator.le, "at most "),
}
_HOST = torch.device("cpu")
_LARGEST_SPAN = 2**31 - 4  # csrc/common/hooks.h indexes with 32 bits


def ordered(
    declared: Sequence[Param],
    captures: Mapping[str, Value],
    given: Mapping[str, Value] | None,
    sizes: Mapping[str, int],
    device: torch.device = _HOST,
) -> list[Value]:
    """The values in the order of declaration, checked.

    Args:
        declared: what the variant reads.
        captures: values that the variant brings along; ``given`` overrides them.
        given: by name.
        sizes: what the symbols of ``Param.shape`` stand for.
        device: where tensors must be.

    Raises:
        TypeError, ValueError: a parameter is missing, unknown, or of another type or shape.
    """
    given = {**captures, **(given or {})} if captures else given or {}
    names = [param.name for param in declared]
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        raise ValueError(f"params={sorted(given)}: expected {sorted(names)}, missing {missing}, unknown {unknown}")
    for param in declared:
        check_fixed(f"params[{param.name!r}]", param, given[param.name], captures)
    return [_checked(param, given[param.name], sizes, device) for param in declared]


def check_captures(declared: Sequence[Param], captures: Mapping[str, Value], sizes: Mapping[str, int]) -> None:
    """Check the values that a variant brings along before a kernel is built for it.

    Args:
        declared: what the variant reads.
        captures: the values, tensors on any device.
        sizes: those that are known; dimensions of other sizes are not checked.

    Raises:
        TypeError, ValueError: a value of another type, shape or range than declared.
    """
    for param in declared:
        if param.name in captures:
            value = captures[param.name]
            _checked(param, value, sizes, value.device if isinstance(value, Tensor) else _HOST)


def check_fixed(label: str, param: Param, value: Value, captures: Mapping[str, Value]) -> None:
    """A fixed parameter has the value that its variant was made with."""
    if param.fixed and param.name in captures and not same_value(value, captures[param.name]):
        raise ValueError(
            f"{label}={value!r}: expected {captures[param.name]!r}, which the variant was made with; make another one"
        )


def check_range(label: str, param: Param, value: float) -> None:
    """A number lies where its declaration says, and a word of its type holds it."""
    # Python turns no int of any length into text.
    long = isinstance(value, int) and value.bit_length() > 64
    shown = f"an int of {int(value).bit_length()} bits" if long else f"{value!r}"
    if param.dtype == torch.int64 and not -(2**63) <= value < 2**63:
        raise ValueError(f"{label}={shown}: expected an int of 64 bits, from -2**63 to 2**63 - 1")
    if param.dtype == torch.float32:
        try:
            struct.pack("<f", float(value))
        except OverflowError:
            raise ValueError(f"{label}={shown}: expected a number that a float32 holds, up to 3.4e38, or inf") from None
    if param.above is not None and not (value > param.above and (isinstance(value, int) or math.isfinite(value))):
        raise ValueError(f"{label}={value!r}: expected a finite number above {param.above:g}")


def _checked(param: Param, value: Value, sizes: Mapping[str, int], device: torch.device) -> Value:
    label = f"params[{param.name!r}]"
    if param.scalar:
        if isinstance(value, Tensor | bool) or not isinstance(value, int | float):
            raise TypeError(f"{label}={value!r}: expected a number")
        if param.dtype == torch.int64 and not isinstance(value, int):
            raise TypeError(f"{label}={value!r}: expected an int")
        check_range(label, param, value)
        return float(value) if param.dtype == torch.float32 else value
    tensor = check_tensor(label, value, dtype=param.dtype, ndim=len(param.shape), device=device)
    for dim, size in enumerate(param.shape):
        wanted = _size(size, sizes) if isinstance(size, str) else size
        sign = size[:2] if isinstance(size, str) and size[:2] in _SIGNS else "=="
        if wanted is not None and not _SIGNS[sign][0](tensor.shape[dim], wanted):
            bound = f"{_SIGNS[sign][1]}{wanted}"
            raise ValueError(f"{label}.shape={tuple(tensor.shape)}: expected {bound} ({size}) in dimension {dim}")
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and span >= _LARGEST_SPAN:
        raise ValueError(f"{label}: expected to span fewer than {_LARGEST_SPAN} elements, got {span + 1}")
    return tensor


def _size(size: str, sizes: Mapping[str, int]) -> int | None:
    """What an entry of Param.shape stands for; None where that is not known yet."""
    symbol = size.removeprefix(">=").removeprefix("<=")
    whole = sizes.get(symbol.removesuffix("/2"))
    return whole // 2 if whole is not None and symbol.endswith("/2") else whole


@functools.cache
def spare_word(device: torch.device) -> Tensor:
    """What an empty tensor of a device has for its address: a hook's ``at`` reads something, and drops it."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def pack(declared: Sequence[Param], values: Sequence[Value]) -> ctypes.Array[ctypes.c_uint64]:
    """The words of checked values: a number, or an address, its strides in elements and its sizes."""
    words: list[int] = []
    for param, value in zip(declared, values, strict=True):
        if isinstance(value, Tensor):
            check_stored(f"params[{param.name!r}]", value)
            words.append((value if value.numel() else spare_word(value.device)).data_ptr())
            words.extend(stride & 0xFFFFFFFFFFFFFFFF for stride in value.stride())
            words.extend(value.shape)
        elif param.dtype == torch.float32:
            words.append(struct.unpack("<I", struct.pack("<f", value))[0])
        else:
            words.append(int(value) & 0xFFFFFFFFFFFFFFFF)
    return (ctypes.c_uint64 * max(len(words), 1))(*words)
