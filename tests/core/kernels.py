"""Every kernel that the tests of the engine use, built together on first use by one call of the JIT.

Few kernels, many shapes: heads, groups, bands, block sizes, strides and workers are run-time arguments, so a plain
kernel is a dtype and a head size, and each hook has one kernel at head size 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from attnloom import variants
from attnloom.core.attention import Attention
from attnloom.core.host import host_spec
from attnloom.core.jit import build
from attnloom.core.kernels import attention_spec
from attnloom.core.variant import Variant
from tests.core import variant_cases as cases

_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Plain:
    """A kernel without hooks."""

    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-{self.head_dim}"


PLAIN = (
    *(Plain(_F32, dim) for dim in (64, 80, 96, 112, 128, 192, 256)),
    *(Plain(_BF16, dim) for dim in (64, 80, 128, 256)),
    *(Plain(_F16, dim) for dim in (64, 112)),
)

HOOKED: tuple[tuple[torch.dtype, Variant], ...] = (
    *((_F32, case.variant) for case in cases.HOOKS.values()),
    *((_F32, case.variant) for case in (cases.SOFT_CAP, cases.ALIBI, cases.STATEFUL, cases.CHAIN)),
    (_F32, variants.PackedMask()),
    (_F32, cases.ALL_OF_THE_CATALOGUE),
    (_F32, cases.DIALECT),
    (_BF16, cases.STATEFUL.variant),
)


INVARIANT_PLAIN = (Plain(_F32, 64), Plain(_F32, 80), Plain(_BF16, 128), Plain(_F16, 112))

INVARIANT: tuple[Variant, ...] = (
    *cases.INVARIANT.values(),
    *(cases.HOOKS[name].variant for name in ("sink", "sigmoid")),
    variants.PackedMask(),
    cases.CHUNKED,
    cases.LOCAL_AND_FIRST,
)
"""Built for the batch_invariant mode, in float32."""


@cache
def prebuild() -> None:
    """All kernels in one build; what the cache holds is left alone."""
    plain = [
        attention_spec("cpu", kernel.dtype, kernel.head_dim, kernel.head_dim, Variant("plain")) for kernel in PLAIN
    ]
    hooked = [attention_spec("cpu", dtype, cases.HEAD_DIM, cases.HEAD_DIM, variant) for dtype, variant in HOOKED]
    build([host_spec(), *plain, *hooked])


@cache
def prebuild_invariant() -> None:
    """Those of the batch_invariant mode."""
    plain = [(kernel.dtype, kernel.head_dim, Variant("plain")) for kernel in INVARIANT_PLAIN]
    hooked = [(_F32, cases.HEAD_DIM, variant) for variant in INVARIANT]
    build(
        [
            host_spec(),
            *(
                attention_spec("cpu", dtype, dim, dim, variant, batch_invariant=True)
                for dtype, dim, variant in (*plain, *hooked)
            ),
        ]
    )


@cache
def invariant_engine(
    kernel: Plain, num_qo_heads: int, num_kv_heads: int, variant: Variant, chunk: int | None = None
) -> Attention:
    """An engine in the batch_invariant mode. `chunk`: KV tiles of a chunk, so that few tokens make many of them."""
    prebuild_invariant()
    engine = Attention(
        num_qo_heads, num_kv_heads, kernel.head_dim, dtype=kernel.dtype, variant=variant, batch_invariant=True
    )
    if chunk is not None:
        engine.plan_key = engine.plan_key._replace(chunk=chunk)
    return engine


@cache
def plain_engine(
    kernel: Plain, num_qo_heads: int, num_kv_heads: int, left: int | None = None, right: int | None = 0
) -> Attention:
    """An engine without hooks; left and right are its band."""
    prebuild()
    band = Variant("banded", left=left, right=right)
    return Attention(num_qo_heads, num_kv_heads, kernel.head_dim, dtype=kernel.dtype, variant=band)


@cache
def engine_of(variant: Variant, dtype: torch.dtype = _F32) -> Attention:
    """An engine of a variant case: 6 query heads over 2 KV heads of 64."""
    prebuild()
    return Attention(cases.NUM_QO_HEADS, cases.NUM_KV_HEADS, cases.HEAD_DIM, dtype=dtype, variant=variant)
