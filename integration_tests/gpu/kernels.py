"""Every kernel that the oracle tests use, built together on first use by one call of the JIT.

Few kernels, many shapes: heads, groups, bands, page sizes, strides and workers are run-time arguments.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import torch

from attnloom import Attention
from attnloom.core.device_module import device_spec
from attnloom.core.devices import target_of
from attnloom.core.host import host_spec
from attnloom.core.jit import build
from attnloom.core.kernels import attention_spec
from attnloom.core.tiles import family_for
from integration_tests.gpu.storage import DEVICE
from integration_tests.gpu.variant_cases import CATALOGUE, HOOKS, TOGETHER, VARIANTS, VariantCase

BF16, F16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
_SHORT = {BF16: "bf16", F16: "f16", E4M3: "e4m3", E5M2: "e5m2"}


@dataclass(frozen=True)
class Kernel:
    """What is compiled in, but for the chunk.

    Attributes:
        name: of a variant case.
        chunk: KV tiles of a chunk in the batch_invariant mode; 0: not in it.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    name: str = "plain"
    chunk: int = 0

    def __str__(self) -> str:
        mode = f"-chunks of {self.chunk}" if self.chunk else ""
        return f"{self.name}-{_SHORT[self.dtype]}-{_SHORT[self.kv_dtype]}-{self.head_dim}{mode}"

    @property
    def case(self) -> VariantCase:
        return VARIANTS[self.name]


PLAIN = (
    *(Kernel(BF16, BF16, dim) for dim in (64, 112, 128, 256)),
    *(Kernel(F16, F16, dim) for dim in (80, 96, 192)),
    *(Kernel(BF16, E4M3, dim) for dim in (112, 128)),
    Kernel(BF16, E5M2, 192),
    Kernel(F16, E4M3, 256),
    Kernel(F16, E5M2, 80),
)
_DIMS = (64, 128, 80, 96, 112)
ALONE = tuple(
    Kernel((BF16, F16)[i % 2], (BF16, F16)[i % 2], _DIMS[i % len(_DIMS)], name) for i, name in enumerate(HOOKS)
)
ALL = (
    *(Kernel(BF16, BF16, 128, name) for name in TOGETHER),
    Kernel(F16, E4M3, 64, "all"),
    Kernel(BF16, E5M2, 192, "all, no softmax"),
)
NAMED = (
    *(Kernel(BF16, BF16, 128, name) for name in CATALOGUE),
    Kernel(BF16, E4M3, 128, "rope"),
    Kernel(F16, F16, 256, "cap, alibi, sinks"),
)
KERNELS = (*PLAIN, *ALONE, *ALL, *NAMED)
INVARIANT = (
    Kernel(BF16, BF16, 128, chunk=2),
    Kernel(F16, F16, 64, chunk=1),
    Kernel(BF16, BF16, 256, chunk=3),
    Kernel(BF16, E4M3, 128, chunk=2),
    Kernel(BF16, BF16, 128, "all, of positions", chunk=2),
    Kernel(F16, E5M2, 80, "all, of positions", chunk=1),
    Kernel(BF16, BF16, 64, "no softmax", chunk=2),
    Kernel(BF16, BF16, 128, "cap, alibi, sinks", chunk=2),
    Kernel(F16, F16, 128, "chunks", chunk=1),
    Kernel(BF16, BF16, 128, "local and first", chunk=2),
)
"""Of the batch_invariant mode, with chunks so short that few tokens make many; test_batch_invariant.py."""


@cache
def prebuild() -> None:
    """All kernels, the planner and what else a launch needs, in one build; what the cache holds is left alone."""
    target, family = target_of(DEVICE), family_for(DEVICE)
    build(
        [
            host_spec(),
            *([device_spec(target)] if target else []),
            *(
                attention_spec(
                    family.name,
                    kernel.dtype,
                    kernel.head_dim,
                    kernel.head_dim,
                    kernel.case.variant,
                    target,
                    kernel.kv_dtype,
                    kernel.chunk > 0,
                )
                for kernel in (*KERNELS, *INVARIANT)
                if kernel.kv_dtype in (kernel.dtype, *family.kv_dtypes)
            ),
        ]
    )


@cache
def engine_of(
    kernel: Kernel, num_qo_heads: int, num_kv_heads: int, left: int | None = None, right: int | None = 0
) -> Attention:
    """The engine of a kernel under a band."""
    prebuild()
    engine = Attention(
        num_qo_heads,
        num_kv_heads,
        kernel.head_dim,
        dtype=kernel.dtype,
        kv_dtype=kernel.kv_dtype,
        variant=dataclasses.replace(kernel.case.variant, left=left, right=right),
        device=DEVICE,
        batch_invariant=kernel.chunk > 0,
    )
    if kernel.chunk:
        engine.plan_key = engine.plan_key._replace(chunk=kernel.chunk)
    return engine
