"""Arguments that were checked, seen again quickly: what a launch depends on of its tensors beside their addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

# Dynamo's own guard in C++: one call instead of four attributes and a tuple for each tensor, which would be half of all
# that a launch does in Python. It asks for more than looks_of() does, whether a tensor is one of inference mode, say:
# what it refuses may still look the same.
_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)

_MOST_RECENT = 4

_guarded: set[type] = set()
"""Classes of tensors. Guards know them by their addresses, which must not become another's."""

Made = TypeVar("Made")


def looks_of(rows: Tensor) -> tuple[object, ...]:
    """Shape, strides, dtype and device, and whether more than memory says what the tensor is (checks.check_stored)."""
    bits = (rows.is_neg(), rows.is_conj(), rows._is_zerotensor())
    return (rows.shape, rows.stride(), rows.dtype, rows.device, bits)


def guard_of(*tensors: Tensor) -> Callable[..., bool]:
    """A function of as many arguments: False where one is no tensor or does not look like its counterpart here.

    What is one tensor here must be one there. No argument may be a nested tensor: Dynamo's guard asks for strides,
    which these do not have, and ends the process.
    """
    for at, each in enumerate(tensors):
        if (first := next(place for place, other in enumerate(tensors) if other is each)) < at:
            return _once_more(first, at, guard_of(*tensors[:at], *tensors[at + 1 :]))
    _guarded.update(map(type, tensors))
    if _Guards is None:
        kinds, looks = [*map(type, tensors)], [*map(looks_of, tensors)]
        return lambda *others: kinds == [*map(type, others)] and looks == [*map(looks_of, others)]
    sizes = [list(each.shape) for each in tensors]
    strides = [list(each.stride()) for each in tensors]
    check: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _once_more(first: int, at: int, same: Callable[..., bool]) -> Callable[..., bool]:
    """A guard of tensors of which one comes twice: Dynamo's wants each once."""
    return lambda *others: others[at] is others[first] and same(*others[:at], *others[at + 1 :])


def same_number(one: object, other: object) -> bool:
    """Whether two arguments that are not one object are one number; True is not 1.0, 0.0 not -0.0, a tensor not any."""
    return type(one) is type(other) is float and one == other != 0


class Seen(threading.local, Generic[Made]):
    """What was made for arguments that were checked, for others that look the same.

    A thread has its own: another one may launch between the writing of a struct and its use.

    Attributes:
        recent: a few, the latest first, to be asked before keys are made: layers come one after the other, now and then
            of several pools.
    """

    def __init__(self, most: int = 256) -> None:
        self.recent: tuple[Made, ...] = ()
        self.made: dict[object, Made] = {}
        self._most = most

    def keep(self, key: object, made: Made) -> None:
        """It is found in ``made`` until there are too many."""
        if len(self.made) >= self._most:
            self.made.clear()
        self.made[key] = made

    def use(self, made: Made) -> None:
        """It comes first from now on."""
        self.recent = (made, *[each for each in self.recent if each is not made][: _MOST_RECENT - 1])
