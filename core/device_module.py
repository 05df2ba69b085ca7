"""The device module: the planner, KV append and state merging on a GPU; one library per architecture, as the host's."""

from __future__ import annotations

import ctypes
import functools

import torch

from attnloom.core.abi import AppendParams, MergeParams, PlanHeader, PlanParams, checked
from attnloom.core.devices import target_of
from attnloom.core.errors import LoadFailed
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import CSRC

_SOURCES = ("cuda/planner.cu", "cuda/append.cu", "cuda/append_fp8.cu", "cuda/merge.cu", "cuda/device.cu")
_FUNCTIONS = [
    "attnloom_plan_scan_device",
    "attnloom_append",
    "attnloom_merge",
    "attnloom_capture",
    "attnloom_prepare",
    "attnloom_allocate",
    "attnloom_release",
    "attnloom_zero",
]


@functools.cache
def device_spec(target: str) -> ModuleSpec:
    """What the device module is built from.

    Args:
        target: architecture, e.g. ``90a``.
    """
    sources = (CSRC / name for name in _SOURCES)
    # The toolchain is that of every CUDA family; the sources are none of their kernels.
    return ModuleSpec("device", tuple(Source(path.name, path.read_text()) for path in sources), "sm80", target)


@functools.cache
def device_module(device: torch.device) -> ctypes.CDLL:
    """The device module for the architecture of a CUDA device, built if need be, its kernels brought onto the device.

    Raises:
        LoadFailed: its kernels cannot run there.
    """
    structs = [PlanHeader, PlanParams, MergeParams, AppendParams]
    library = checked(load(device_spec(target_of(device))), _FUNCTIONS, structs)
    with torch.cuda.device(device):
        error = library.attnloom_prepare()
    if error:
        raise LoadFailed(f"{library._name}: its kernels cannot run on {device}: CUDA error {error}")
    return library
