"""KV caches as frameworks lay them out: logical `[num_blocks, block_size, heads, dim]` views over poisoned memory.

Every element starts as NaN or +-Inf, the memory between and around the views included, so that whatever a kernel reads
beyond the tokens written by a test shows in its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[int, int, int, int, int, torch.dtype], Pair]


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of NaN, Inf and -Inf in turn."""
    flat = torch.full((math.prod(shape),), math.nan, dtype=dtype)
    flat[1::3] = math.inf
    flat[2::3] = -math.inf
    return flat.reshape(shape)


def _nhd(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    return poisoned(blocks, page, heads, dim, dtype=dtype), poisoned(blocks, page, heads, dim_v, dtype=dtype)


def _hnd(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    k = poisoned(blocks, heads, page, dim, dtype=dtype)
    v = poisoned(blocks, heads, page, dim_v, dtype=dtype)
    return k.transpose(1, 2), v.transpose(1, 2)


def _kv_first(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    both = poisoned(2, blocks, page, heads, max(dim, dim_v), dtype=dtype)
    return both[0, ..., :dim], both[1, ..., :dim_v]


def _kv_in_block(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    both = poisoned(blocks, 2, page, heads, max(dim, dim_v), dtype=dtype)
    return both[:, 0, ..., :dim], both[:, 1, ..., :dim_v]


def _interleaved(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    both = poisoned(blocks, heads, page, dim + dim_v, dtype=dtype).transpose(1, 2)
    return both[..., :dim], both[..., dim:]


def _view(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    k = poisoned(blocks + 3, page + 1, heads + 2, dim + 8, dtype=dtype)
    v = poisoned(blocks + 1, page + 2, heads + 1, dim_v + 16, dtype=dtype)
    return k[2:-1, :-1, 1:-1, 8:], v[1:, 2:, :-1, :dim_v]


def _slot_major(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    k = poisoned(page, heads, blocks, dim, dtype=dtype)
    v = poisoned(heads, page, blocks, dim_v, dtype=dtype)
    return k.permute(2, 0, 1, 3), v.permute(2, 1, 0, 3)


def _every_third_layer(blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    k = poisoned(blocks, 3, page, heads, dim, dtype=dtype)
    v = poisoned(blocks, 3, page, heads, dim_v, dtype=dtype)
    return k[:, 1], v[:, 2]


STORAGES: dict[str, Make] = {
    "nhd": _nhd,
    "hnd": _hnd,
    "kv_first": _kv_first,
    "kv_in_block": _kv_in_block,
    "interleaved": _interleaved,
    "view": _view,
    "slot_major": _slot_major,
    "every_third_layer": _every_third_layer,
}


def caches(storage: str, blocks: int, page: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Pair:
    """K and V of one layer, all poison."""
    k, v = STORAGES[storage](blocks, page, heads, dim, dim_v, dtype)
    assert k.shape == (blocks, page, heads, dim) and v.shape == (blocks, page, heads, dim_v)
    return k, v
