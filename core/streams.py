"""Streams and captures of CUDA devices, cheaply: these calls are made at every launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def _of_a_cuda_build(name: str) -> Callable[..., Any]:
    """A function of torch's bindings that builds without CUDA lack; nobody calls it there."""
    found: Callable[..., Any] = getattr(torch._C, name, None) or (lambda *_: 0)
    return found


# torch.cuda.current_stream() and current_device() build objects or check for a context each time, which takes longer
# than all else a launch does in Python. These are what they ask; Inductor's generated code calls them too.
current_stream: Callable[[int], int] = _of_a_cuda_build("_cuda_getCurrentRawStream")
"""Handle of the current stream of a device, by its index."""
current_device: Callable[[], int] = _of_a_cuda_build("_cuda_getDevice")
"""Index of the current device."""
capturing: Callable[[], bool] = _of_a_cuda_build("_cuda_isCurrentStreamCapturing")
"""Whether the current stream of the current device is being captured into a CUDA graph."""


def stream_of(device: torch.device) -> int | None:
    """Handle of a device's current stream; None on a CPU."""
    return None if device.type != "cuda" else current_stream(device.index)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a CUDA device the current one, on which modules launch; nothing on a CPU or where it is already."""
    if device.type != "cuda" or current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)
