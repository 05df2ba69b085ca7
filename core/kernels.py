"""Attention kernels: what one is built from, and the loaded module."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from attnloom.core.abi import AttentionParams, BlockMaskParams, FinishParams, checked
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import Rendering
from attnloom.core.variant import HOOKS, Variant

_SCALARS = {
    torch.float32: ("float", "f32"),
    torch.bfloat16: ("attnloom::cpu::Bf16", "bf16"),
    torch.float16: ("attnloom::cpu::Fp16", "f16"),
}


@dataclass(frozen=True)
class _RenderedParam:
    name: str
    cpp_type: str
    cpp_read: str
    word_offset: int


@functools.lru_cache(maxsize=256)
def attention_spec(family: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, variant: Variant) -> ModuleSpec:
    """What the kernel of a shape and variant is built from. Bands are not compiled in, so they are dropped here."""
    params, offset = [], 0
    for param in variant.params:
        params.append(_RenderedParam(param.name, param.cpp_type, param.cpp_read, offset))
        offset += param.words
    scalar, short = _SCALARS[dtype]
    name = f"{family}_attention_{short}_d{head_dim}_{variant.kernel_name}"[:128]
    text = Rendering.of(
        f"{family}/attention.cpp.jinja",
        scalar=scalar,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        variant={
            "name": variant.kernel_name,
            "params": params,
            "use_softmax": variant.use_softmax,
            "mask_by_head": any("head" in text for text in variant.texts("logits_mask")),
            **{hook: getattr(variant, hook) for hook in HOOKS},
        },
    )
    return ModuleSpec(name, (Source("attention.cpp", text),), family)


def attention_module(spec: ModuleSpec) -> ctypes.CDLL:
    """The loaded kernel, built if need be."""
    return checked(load(spec), ["attnloom_run", "attnloom_finish"], [AttentionParams, FinishParams, BlockMaskParams])
