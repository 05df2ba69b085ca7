"""The module of a device that serves every engine there: the host's, or a GPU's."""

from __future__ import annotations

import ctypes

import torch

from attnloom.core.device_module import device_module
from attnloom.core.host import host_module


def module_for(device: torch.device) -> ctypes.CDLL:
    """Where KV append and state merging for tensors on this device are found.

    Raises:
        ValueError: a device without kernels.
    """
    if device.type == "cpu":
        return host_module()
    if device.type == "cuda":
        return device_module(device)
    raise ValueError(f"device={device}: expected cpu or cuda")
