"""Stands in for SGLang's compiled kernels on a machine without a GPU.

SGLang imports them by name wherever it finds itself on a CPU. Without AMX its layers take `forward_native`, so a name
only has to exist: what is called raises. Speculative decoding calls two, for which SGLang itself has Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def build_tree_kernel_efficient_cpu(*args: Any) -> None:
    """The draft tree's mask, positions and links, by the Triton kernel with the same arguments."""
    from sglang.srt.speculative.eagle_utils import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*args)


def verify_tree_greedy_cpu(**kwargs: Any) -> None:
    """Which drafts the target accepts, by the Triton kernel; three arguments are spelled otherwise there."""
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_triton

    verify_tree_greedy_triton(**{name.replace("retrive_", "retrieve_"): value for name, value in kwargs.items()})


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} was called, and this machine has no build of SGLang's kernels")

    return missing


# The same for those that are looked up among torch's operators while modules are imported.
for _name in ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu", "fused_sigmoid_mul_cpu"):
    setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
