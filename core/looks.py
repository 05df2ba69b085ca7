"""What a launch depends on of its tensors beside their addresses, and a quick way to see that it is still the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Dynamo's own guard in C++: one call instead of four attributes and a tuple for each tensor, which would be a third of
# all that a launch does in Python. It asks for more than looks_of() does, whether a tensor is one of inference mode,
# say: what it refuses may still look the same.
_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def looks_of(rows: Tensor) -> tuple[object, ...]:
    """Shape, strides, dtype and device, and whether more than memory says what the tensor is (checks.check_stored)."""
    bits = (rows.is_neg(), rows.is_conj(), rows._is_zerotensor())
    return (rows.shape, rows.stride(), rows.dtype, rows.device, bits)


def guard_of(*tensors: Tensor) -> Callable[..., bool]:
    """A function of as many arguments: False where one is no tensor or does not look like its counterpart here.

    It may also be False where an argument comes twice: Dynamo wants each tensor once. No argument may be a nested
    tensor: Dynamo's guard asks for strides, which these do not have, and ends the process.
    """
    if _Guards is None:
        looks = [looks_of(each) for each in tensors]
        return lambda *others: all(isinstance(each, Tensor) for each in others) and looks == [*map(looks_of, others)]
    sizes = [list(each.shape) for each in tensors]
    strides = [list(each.stride()) for each in tensors]
    check: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check
