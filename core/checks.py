"""Argument checks: each error names the argument, its value and what was expected."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes that bases and strides of caches are multiples of: what one vector load of a kernel takes."""

_PLAIN = (Tensor, torch.nn.Parameter)

LARGEST_STRIDE = 2**31 - 1
"""Bytes. CUDA kernels multiply indices by strides of 32 bits; the products have 64 (csrc/sm80/loader.h)."""


def check_tensor(
    name: str,
    value: object,
    *,
    dtype: torch.dtype | None = None,
    ndim: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """``value`` as a tensor of this dtype, number of dimensions and device; ``None`` leaves one open."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name}.dtype={value.dtype}: expected {dtype}")
    if ndim is not None and value.dim() != ndim:
        raise ValueError(f"{name}.shape={tuple(value.shape)}: expected {ndim} dimensions")
    if device is not None and value.device != device:
        raise ValueError(f"{name}.device={value.device}: expected {device}")
    # Under torch.compile no memory is there yet, and Dynamo does not trace is_neg(); params are looked at when packed.
    if not torch.compiler.is_compiling():
        check_stored(name, value)
    return value


def check_stored(name: str, value: Tensor) -> None:
    """The tensor is what lies in memory, which is all that a kernel reads."""
    if value.is_neg():
        raise ValueError(f"{name}.is_neg()=True: expected a tensor without torch's negative bit, {name}.resolve_neg()")
    if value.is_conj():
        raise ValueError(
            f"{name}.is_conj()=True: expected a tensor without torch's conjugate bit, {name}.resolve_conj()"
        )
    if value.is_nested or value.layout != torch.strided:
        raise ValueError(f"{name}.layout={value.layout}, {name}.is_nested={value.is_nested}: expected a dense tensor")
    # Zeros that torch keeps as such have no address, nor have wrappers of tensors, whose views may seem to have one, or
    # tensors that torch.func maps. Most tensors are plain, and are asked for every layer.
    try:
        address = value.data_ptr() if type(value) in _PLAIN else value.untyped_storage().data_ptr()
    except RuntimeError:
        address = 0
    if address == 0 and value.numel() and value.device.type != "meta":
        raise ValueError(f"{name}: expected a tensor with memory, got {type(value).__name__} without")


def check_contiguous_last(name: str, value: Tensor) -> None:
    """The last dimension has stride 1."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}.stride()={value.stride()}: expected the last dimension to be contiguous")


def check_aligned(name: str, value: Tensor, alignment: int = ALIGNMENT) -> None:
    """Base and strides are multiples of ``alignment`` bytes; strides of dimensions of size 1 do not count."""
    size = value.element_size()
    if value.data_ptr() % alignment:
        raise ValueError(f"{name}.data_ptr()={value.data_ptr():#x}: expected a multiple of {alignment} bytes")
    for dim in range(value.dim() - 1):
        if value.shape[dim] > 1 and value.stride(dim) * size % alignment:
            raise ValueError(
                f"{name}.stride()={value.stride()}: expected strides of a multiple of {alignment} bytes, "
                f"dimension {dim} has {value.stride(dim) * size}"
            )


def check_strides(name: str, tensor: Tensor) -> None:
    """Blocks, slots and heads of a cache, tokens and heads of q are less than 2 GiB apart on a GPU."""
    for dim in range(tensor.ndim - 1):
        length = tensor.stride(dim) * tensor.element_size()
        if tensor.shape[dim] > 1 and length > LARGEST_STRIDE:
            raise ValueError(
                f"{name}.stride()={tensor.stride()}: expected strides of at most {LARGEST_STRIDE} bytes, "
                f"dimension {dim} has {length}"
            )


def check_positive(name: str, value: object) -> int:
    """An integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an int")
    if value < 1:
        raise ValueError(f"{name}={value}: expected at least 1")
    return value


def check_positive_int32(name: str, value: object) -> int:
    """An integer of at least 1 that fits into 32 bits with its sign."""
    checked = check_positive(name, value)
    if checked >= 2**31:
        raise ValueError(f"{name}={value}: expected at most {2**31 - 1}")
    return checked


def check_above(name: str, value: object, bound: float) -> float:
    """A finite number larger than ``bound``, as it is and as a float32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: expected a number")
    single = _as_float32(value)
    if not (math.isfinite(single) and single > bound):
        raise ValueError(f"{name}={value!r}: expected a finite float32 above {bound:g}")
    return float(value)


def check_on_host(name: str, scale: object) -> None:
    """To read a number of a device is to wait for it."""
    if isinstance(scale, Tensor) and scale.device.type != "cpu":
        raise ValueError(f"{name}.device={scale.device}: expected a number, or a tensor on the host")


def check_scale(name: str, value: object) -> float:
    """A finite factor: a number, or a tensor of one element. What is not 0 is not 0 as a float32 either."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}.shape={tuple(value.shape)}: expected one element")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: expected a number")
    single = _as_float32(value)
    if not math.isfinite(single) or (single == 0 and value != 0):
        raise ValueError(f"{name}={value}: expected a finite number, as a float32 too")
    return float(value)


def _as_float32(value: float) -> float:
    """What a kernel gets; an int beyond every float is infinite."""
    try:
        return ctypes.c_float(value).value
    except OverflowError:
        return math.inf
