"""Poisoned memory, and KV caches in it as frameworks lay them out.

Every byte is NaN or Inf until a test writes it, what lies between and around the views included: whatever a kernel
reads beyond its tokens shows in the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
"""Where everything here lies. The tests need a GPU; without one their parts can be tried out on a CPU."""

STORAGES = (
    *("nhd", "hnd", "kv_first", "kv_in_block", "interleaved", "view", "slot_major", "every_third_layer"),
    "heads_apart",  # tokens lie alike in K and V, heads do not
)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Contiguous, NaN and Inf in turn."""
    count = math.prod(shape)
    if dtype.itemsize == 1:
        flat = torch.full((count,), 0x7F, dtype=torch.uint8, device=DEVICE)
        flat[1::3] = 0x7C if dtype == torch.float8_e5m2 else 0xFF  # Inf, where the type has one
        return flat.view(dtype).reshape(shape)
    flat = torch.full((count,), math.nan, dtype=dtype, device=DEVICE)
    flat[1::3] = math.inf
    flat[2::3] = -math.inf
    return flat.reshape(shape)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def caches(storage: str, blocks: int, page: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of one layer, `[blocks, page, heads, dim]`, all poison."""

    def new(*shape: int) -> Tensor:
        return poisoned(*shape, dtype=dtype)

    if storage == "nhd":
        return new(blocks, page, heads, dim), new(blocks, page, heads, dim)
    if storage == "hnd":
        return new(blocks, heads, page, dim).transpose(1, 2), new(blocks, heads, page, dim).transpose(1, 2)
    if storage == "kv_first":
        both = new(2, blocks, page, heads, dim)
        return both[0], both[1]
    if storage == "kv_in_block":
        both = new(blocks, 2, page, heads, dim)
        return both[:, 0], both[:, 1]
    if storage == "interleaved":
        both = new(blocks, heads, page, 2 * dim).transpose(1, 2)
        return both[..., :dim], both[..., dim:]
    if storage == "view":
        k, v = new(blocks + 3, page + 1, heads + 2, dim + 16), new(blocks + 1, page + 2, heads + 1, dim + 32)
        return k[2:-1, :-1, 1:-1, 16:], v[1:, 2:, :-1, :dim]
    if storage == "slot_major":
        return new(page, heads, blocks, dim).permute(2, 0, 1, 3), new(heads, page, blocks, dim).permute(2, 1, 0, 3)
    if storage == "heads_apart":
        return new(blocks, page, heads, 2 * dim)[..., dim:], new(blocks, page, 2, heads, dim)[:, :, 0]
    assert storage == "every_third_layer"
    return new(blocks, 3, page, heads, dim)[:, 1], new(blocks, 3, page, heads, dim)[:, 2]
