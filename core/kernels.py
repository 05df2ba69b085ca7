"""Attention kernels: what one is built from, the loaded module, and how many of its CTAs a GPU holds."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from attnloom.core.abi import AttentionParams, BlockMaskParams, FinishParams, checked
from attnloom.core.device_module import device_module
from attnloom.core.devices import has_little_shared
from attnloom.core.errors import LoadFailed
from attnloom.core.hook_text import code_of, function_body, keys_by_column
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import Rendering
from attnloom.core.params import spare_word
from attnloom.core.tiles import FAMILIES, Tiles, is_slim
from attnloom.core.variant import HOOKS, Variant

_SHORT = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_SCALARS = {
    "cpu": {torch.float32: "float", torch.bfloat16: "attnloom::cpu::Bf16", torch.float16: "attnloom::cpu::Fp16"},
    "sm80": {
        torch.bfloat16: "__nv_bfloat16",
        torch.float16: "__half",
        torch.float8_e4m3fn: "__nv_fp8_e4m3",
        torch.float8_e5m2: "__nv_fp8_e5m2",
    },
}
_ENDING = {"cpu": "cpp", "sm80": "cu"}
_ALIKE = {"cpu": "cpu", "sm80": "sm80_alike"}  # toolchains of the batch_invariant mode


@dataclass(frozen=True)
class _RenderedParam:
    name: str
    cpp_type: str
    cpp_read: str
    word_offset: int


@functools.lru_cache(maxsize=256)
def attention_spec(
    family: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    variant: Variant,
    target: str = "",
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> ModuleSpec:
    """What the kernel of a shape and variant is built from. Bands are not compiled in, so they are dropped here.

    Args:
        target: of a CUDA family, the architecture, e.g. ``90a``.
        kv_dtype: of the caches; None: dtype.
        batch_invariant: the code of the engine's mode of that name.
    """
    params, offset = [], 0
    for param in variant.params:
        params.append(_RenderedParam(param.name, param.cpp_type, param.cpp_read, offset))
        offset += param.words
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    short = _SHORT[dtype] if kv_dtype == dtype else f"{_SHORT[dtype]}_{_SHORT[kv_dtype]}"
    name = f"{family}_attention_{short}_d{head_dim}_{'invariant_' * batch_invariant}{variant.kernel_name}"[:128]
    text = Rendering.of(
        f"{family}/attention.{_ENDING[family]}.jinja",
        scalar=_SCALARS[family][dtype],
        kv_scalar=_SCALARS[family][kv_dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        batch_invariant=batch_invariant,
        little_shared=has_little_shared(target),
        tile_kv=FAMILIES[family].tiles_for(head_dim, target, slim=is_slim(head_dim, kv_dtype, variant)).tile_kv,
        variant={
            "name": variant.kernel_name,
            "params": params,
            "use_softmax": variant.use_softmax,
            "keys_by_column": keys_by_column(variant.texts("key_transform")),
            "mask_by_head": any("head" in code_of(text) for text in variant.texts("logits_mask")),
            **{
                hook: [function_body(text, f"{variant.kernel_name}.{hook}") for text in variant.texts(hook)]
                for hook in HOOKS
            },
        },
    )
    source = Source(f"attention.{_ENDING[family]}", text)
    return ModuleSpec(name, (source,), _ALIKE[family] if batch_invariant else family, target)


def attention_module(spec: ModuleSpec) -> ctypes.CDLL:
    """The loaded kernel, built if need be."""
    return checked(load(spec), ["attnloom_run", "attnloom_finish"], [AttentionParams, FinishParams, BlockMaskParams])


def ctas_per_sm(module: ctypes.CDLL, name: str, device: torch.device, tiles: Tiles, head_dim: int) -> dict[int, int]:
    """Bring a kernel onto its GPU, which may not happen inside a capture.

    Args:
        module: the kernel.
        name: of the kernel, for errors.
        device: the GPU.
        tiles: of the kernel.
        head_dim: of the kernel, for errors.

    Returns:
        By folded rows of a plan's largest query tile: CTAs of the kernel for such plans that an SM holds.

    Raises:
        LoadFailed: it cannot run there.
    """
    device_module(device)
    spare_word(device)
    with torch.cuda.device(device):
        error = module.attnloom_prepare()
        if error:
            raise LoadFailed(f"{name}: its kernel cannot run on {device}: CUDA error {error}")
        found = {tile_q: int(module.attnloom_ctas_per_sm(tile_q)) for tile_q in (tiles.tile_q_short, tiles.tile_q)}
    if 0 in found.values():
        raise LoadFailed(
            f"{name}: its kernel cannot run on {device}: expected a GPU with more shared memory for "
            f"head_dim={head_dim}, {torch.cuda.get_device_name(device)} has too little for one CTA"
        )
    return found
