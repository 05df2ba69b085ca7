"""What a CUDA device is to us: its index, its compute capability as nvcc names it, its multiprocessors."""

from __future__ import annotations

import functools

import torch


def indexed(device: torch.device) -> torch.device:
    """The device with its index: a CUDA device without one is the current one, as everywhere in torch.

    Raises:
        ValueError: a CUDA device that torch does not see.
    """
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={device}: expected a device that torch sees; it sees no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={device}: expected an index below {torch.cuda.device_count()}, what torch sees")
    return torch.device("cuda", index)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, e.g. (9, 0)."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def workers_of(device: torch.device, ctas_per_sm: int, num_kv_heads: int) -> int:
    """CTAs that the device holds, rounded down to whole lockstep groups of kv heads where few are lost by that."""
    workers = multiprocessors(device) * ctas_per_sm
    whole = workers - workers % num_kv_heads
    return whole if whole >= 0.98 * workers else workers


# Shared memory of a CTA is 99 KB at most on compute capability 8.6, 8.9 and 12.x (CUDA C++ Programming Guide, compute
# capabilities); 163 KB and more on the others from 8.0 on.
_LITTLE_SHARED = ("86", "89", "120", "121")


def has_little_shared(target: str) -> bool:
    """Whether kernels for an architecture, as :func:`target_of` names it, must do with 99 KB of shared memory."""
    return target.rstrip("af") in _LITTLE_SHARED


def target_of(device: torch.device) -> str:
    """The architecture for which nvcc compiles: ``90a`` on Hopper, else the capability's digits; empty on a CPU."""
    if device.type != "cuda":
        return ""
    major, minor = capability(device)
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
