"""Memory that ends where no other begins: whoever reads behind it does not come back."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_PROT_NONE = 0


class Guarded:
    """float32 numbers that end at a page which nobody may touch.

    Attributes:
        floats: ``[count]``; not to be used after this object.
    """

    def __init__(self, count: int, value: float) -> None:
        page = mmap.PAGESIZE
        room = -(-count * 4 // page) * page
        self._memory = mmap.mmap(-1, room + page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + room), ctypes.c_size_t(page), _PROT_NONE) != 0:
            raise OSError("mprotect")
        numbers = (ctypes.c_float * count).from_buffer(self._memory, room - count * 4)
        self.floats: Tensor = torch.frombuffer(numbers, dtype=torch.float32).fill_(value)
