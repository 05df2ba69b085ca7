"""Run-time parameters of a variant: from a dict of numbers and tensors to the words a kernel reads."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnloom.core.checks import check_tensor
from attnloom.core.variant import Param

Value = float | int | Tensor

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
    return [_checked(param, given[param.name], sizes, device) for param in declared]


def _checked(param: Param, value: Value, sizes: Mapping[str, int], device: torch.device) -> Value:
    label = f"params[{param.name!r}]"
    if param.scalar:
        if isinstance(value, Tensor | bool) or not isinstance(value, int | float):
            raise TypeError(f"{label}={value!r}: expected a number")
        if param.dtype == torch.int64 and not isinstance(value, int):
            raise TypeError(f"{label}={value!r}: expected an int")
        return value
    tensor = check_tensor(label, value, dtype=param.dtype, ndim=len(param.shape), device=device)
    for dim, size in enumerate(param.shape):
        wanted = sizes[size.removeprefix(">=")] if isinstance(size, str) else size
        least = isinstance(size, str) and size.startswith(">=")
        if wanted is not None and (tensor.shape[dim] < wanted if least else tensor.shape[dim] != wanted):
            bound = f"at least {wanted}" if least else wanted
            raise ValueError(f"{label}.shape={tuple(tensor.shape)}: expected {bound} ({size}) in dimension {dim}")
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and span >= _LARGEST_SPAN:
        raise ValueError(f"{label}: expected to span fewer than {_LARGEST_SPAN} elements, got {span + 1}")
    return tensor


@functools.cache
def spare_word(device: torch.device) -> Tensor:
    """What an empty tensor of a device has for its address: a hook's ``at`` reads something, and drops it."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def pack(declared: Sequence[Param], values: Sequence[Value]) -> ctypes.Array[ctypes.c_uint64]:
    """The words of checked values: a number, or an address, its strides in elements and its sizes."""
    words: list[int] = []
    for param, value in zip(declared, values, strict=True):
        if isinstance(value, Tensor):
            words.append((value if value.numel() else spare_word(value.device)).data_ptr())
            words.extend(stride & 0xFFFFFFFFFFFFFFFF for stride in value.stride())
            words.extend(value.shape)
        elif param.dtype == torch.float32:
            words.append(struct.unpack("<I", struct.pack("<f", value))[0])
        else:
            words.append(int(value) & 0xFFFFFFFFFFFFFFFF)
    return (ctypes.c_uint64 * max(len(words), 1))(*words)
