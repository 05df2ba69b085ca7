"""Stands in for SGLang's compiled kernels on a machine without a GPU.

SGLang imports them by name wherever it finds itself on a CPU. Without AMX its layers take `forward_native`, so a name
only has to exist: what is called raises. Speculative decoding alone calls some (speculative.py).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    found = getattr(importlib.import_module("sgl_kernel.speculative"), name, None)
    if found is not None:
        return found

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} was called, and this machine has no build of SGLang's kernels")

    return missing


# The same for those that are looked up among torch's operators while modules are imported.
for _name in ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu", "fused_sigmoid_mul_cpu"):
    setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
