"""A kernel that reads as many bytes as a row's KV and does nothing else: what is in the way of any attention there."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attnloom.core.devices import target_of
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec, Source

_SOURCE = Path(__file__).with_name("read.cu")
_CHUNK = 16  # bytes of a load
_KEPT = 0x5A5A5A5A  # any word


@functools.cache
def _module(target: str) -> ctypes.CDLL:
    return load(ModuleSpec("plain_read", (Source(_SOURCE.name, _SOURCE.read_text()),), "sm80", target))


def plain_read(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """A launch on the current stream that reads contiguous memory.

    Args:
        num_bytes: to read, a multiple of 16.
        device: the GPU.

    Raises:
        ValueError: num_bytes is no multiple of 16.
    """
    if num_bytes % _CHUNK:
        raise ValueError(f"num_bytes={num_bytes}: expected a multiple of {_CHUNK}")
    read = _module(target_of(device)).read_bytes
    source: Tensor = torch.randint(-(2**31), 2**31, (num_bytes // 4,), dtype=torch.int32, device=device)
    sink = torch.zeros(1, dtype=torch.int32, device=device)

    def run() -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        error = read(
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_int64(num_bytes),
            ctypes.c_int32(_KEPT),
            ctypes.c_void_p(sink.data_ptr()),
            ctypes.c_void_p(stream),
        )
        if error:
            raise RuntimeError(f"plain_read: CUDA error {error}")

    return run
