"""KV append on a GPU writes exactly the slots it is given, in caches of any strides."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attnloom import append_kv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYOUTS = ("NHD", "HND", "interleaved", "view", "odd")


def caches(kind: str, blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V as ``[blocks, block_size, heads, dim]``, filled with sevens, in storage of several kinds."""
    full = {"device": "cuda", "dtype": torch.float32}
    if kind == "NHD":
        pair = [torch.full((blocks, block_size, heads, dim), 7.0, **full).to(dtype) for _ in range(2)]
        return pair[0], pair[1]
    if kind == "HND":
        pair = [torch.full((blocks, heads, block_size, dim), 7.0, **full).to(dtype).transpose(1, 2) for _ in range(2)]
        return pair[0], pair[1]
    if kind == "interleaved":
        both = torch.full((blocks, 2, block_size, heads, dim), 7.0, **full).to(dtype)
        return both[:, 0], both[:, 1]
    extra = 8 if kind == "view" else 1
    wide = torch.full((blocks, block_size, heads + 1, 2 * dim + extra), 7.0, **full).to(dtype)
    return wide[:, :, 1:, :dim], wide[:, :, 1:, dim + extra :]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_only_the_given_slots(kind: str, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    for block_size, heads, dim in ((1, 1, 64), (16, 8, 128), (3, 5, 80), (64, 2, 256)):
        blocks = 9
        k_cache, v_cache = caches(kind, blocks, block_size, heads, dim, dtype)
        tokens = rng.randint(1, blocks * block_size)
        slots = rng.sample(range(blocks * block_size), tokens)
        slots = [-1 if rng.random() < 0.3 else slot for slot in slots]
        rows = torch.randint(0, 100, (2, tokens + 2, heads + 1, dim), device="cuda").to(dtype)
        k, v = rows[0][:, :heads], rows[1][:, 1:]
        expected = [cache.clone(memory_format=torch.contiguous_format) for cache in (k_cache, v_cache)]
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[0][slot // block_size, slot % block_size] = k[token]
                expected[1][slot // block_size, slot % block_size] = v[token]
        append_kv(k, v, k_cache, v_cache, torch.tensor(slots, device="cuda"))
        assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("rows_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches(kind: str, rows_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Rounded as torch rounds, held inside the finite range."""
    for block_size, heads, dim in ((16, 8, 128), (3, 5, 80)):
        k_cache, v_cache = caches(kind, 4, block_size, heads, dim, dtype)
        k, v = (torch.randn(2, 9, heads, dim, device="cuda") * 60).to(rows_dtype)
        k[0, 0, :2] = torch.tensor([60000.0, -60000.0])
        slots = torch.tensor([0, 5, -1, 11, 3, 7, 8, 1, -1], device="cuda")
        append_kv(k, v, k_cache, v_cache, slots, k_scale=0.5, v_scale=2.0)
        largest = torch.finfo(dtype).max
        for rows, cache, scale in ((k, k_cache, 0.5), (v, v_cache, 2.0)):
            wanted = (rows.float() / scale).clamp(-largest, largest).to(dtype)
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    got = cache[slot // block_size, slot % block_size]
                    assert torch.equal(got.float(), wanted[token].float())
            untouched = cache.float().reshape(-1, heads, dim)[[2, 4, 6, 9]]
            assert bool((untouched == 7).all())


def test_scales_in_tensors_are_read_each_time() -> None:
    k_cache, v_cache = caches("NHD", 2, 16, 2, 64, torch.float8_e4m3fn)
    k = torch.full((1, 2, 64), 8.0, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor(1.0)
    for slot, value in enumerate((1.0, 2.0, 4.0)):
        scale.fill_(value)
        append_kv(k, k, k_cache, v_cache, torch.tensor([slot], device="cuda"), k_scale=scale)  # type: ignore[arg-type]
    assert k_cache[0, :3, 0, 0].tolist() == [8.0, 4.0, 2.0] and v_cache[0, :3, 0, 0].tolist() == [8.0] * 3
    on_device = torch.tensor(3.0, device="cuda")
    with pytest.raises(ValueError, match=r"k_scale\.device=cuda:0: expected a number, or a tensor on the host"):
        append_kv(k, k, k_cache, v_cache, torch.tensor([0], device="cuda"), k_scale=on_device)  # type: ignore[arg-type]


def test_scales_of_a_cache_that_needs_none() -> None:
    k_cache, v_cache = caches("NHD", 2, 16, 2, 64, torch.bfloat16)
    k = torch.empty(1, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k_scale=2\.0, v_scale=None: expected None for a torch\.bfloat16 cache"):
        append_kv(k, k, k_cache, v_cache, torch.zeros(1, device="cuda", dtype=torch.int64), k_scale=2.0)


def test_a_page_past_two_to_the_31_elements() -> None:
    block_size, heads, dim = 16, 8, 128
    blocks = 2**31 // (block_size * heads * dim) + 9
    cache = torch.empty(blocks, block_size, heads, dim, device="cuda", dtype=torch.uint8)
    k = torch.randint(0, 255, (1, heads, dim), device="cuda", dtype=torch.uint8)
    append_kv(k, k, cache, cache, torch.tensor([blocks * block_size - 1], device="cuda"))
    assert torch.equal(cache[-1, -1], k[0])


def test_slots_are_read_when_a_graph_is_replayed() -> None:
    k_cache, v_cache = caches("NHD", 4, 16, 2, 64, torch.bfloat16)
    k = torch.randn(3, 2, 64, device="cuda").to(torch.bfloat16)
    slots = torch.full((3,), -1, device="cuda")
    append_kv(k, k, k_cache, v_cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_kv(k, k, k_cache, v_cache, slots)
    assert bool((k_cache == 7).all())
    slots.copy_(torch.tensor([5, -1, 40]))
    graph.replay()
    assert torch.equal(k_cache.view(64, 2, 64)[[5, 40]], k[[0, 2]])
    assert int((k_cache != 7).any(-1).any(-1).sum()) == 2


def test_no_tokens() -> None:
    k_cache, v_cache = caches("NHD", 2, 16, 2, 64, torch.bfloat16)
    empty = torch.empty(0, 2, 64, device="cuda", dtype=torch.bfloat16)
    append_kv(empty, empty, k_cache, v_cache, torch.empty(0, device="cuda", dtype=torch.int64))
    assert bool((k_cache == 7).all())


def test_slots_on_another_device() -> None:
    k_cache, v_cache = caches("NHD", 2, 16, 2, 64, torch.bfloat16)
    k = torch.empty(1, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k\.device=cuda:0: expected cpu"):
        append_kv(k, k, k_cache, v_cache, torch.zeros(1, dtype=torch.int64))


def test_slots_are_checked_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_VALIDATE", "1")
    k_cache, v_cache = caches("NHD", 2, 16, 2, 64, torch.bfloat16)
    k = torch.empty(1, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="slot_mapping=32: expected -1 to 31"):
        append_kv(k, k, k_cache, v_cache, torch.tensor([32], device="cuda"))
