"""Dtypes by the names that the command line knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """An element type. Its torch.dtype is looked up late: the command line starts without torch.

    Attributes:
        name: torch's name of it.
        itemsize: bytes.
    """

    name: str
    itemsize: int

    def torch(self) -> torch.dtype:
        """As torch has it."""
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found


DTYPES = {
    "bf16": Dtype("bfloat16", 2),
    "fp16": Dtype("float16", 2),
    "fp32": Dtype("float32", 4),
}


def dtype_named(text: str) -> Dtype:
    """A dtype by the short name or by torch's.

    Raises:
        ValueError: there is none of that name.
    """
    for short, dtype in DTYPES.items():
        if text.removeprefix("torch.") in (short, dtype.name):
            return dtype
    raise ValueError(f"dtype {text!r}: expected one of {', '.join(DTYPES)}")
