"""append_kv writes exactly the slots it is given, in caches of any strides."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnloom import append_kv
from tests.core.running import bits
from tests.core.storage import STORAGES, caches

NUM_BLOCKS = 6


def _expected(cache: torch.Tensor, rows: torch.Tensor, slots: list[int]) -> torch.Tensor:
    block_size = cache.shape[1]
    result = cache.clone(memory_format=torch.contiguous_format)
    for token, slot in enumerate(slots):
        if slot >= 0:
            result[slot // block_size, slot % block_size] = rows[token]
    return result


@given(
    storage=st.sampled_from(sorted(STORAGES)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    block_size=st.sampled_from((1, 3, 16, 64)),
    heads=st.sampled_from((1, 2, 5)),
    dim=st.sampled_from((64, 80, 128)),
    skip=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
)
def test_append(
    storage: str,
    dtype: torch.dtype,
    block_size: int,
    heads: int,
    dim: int,
    skip: float,
    seed: int,
) -> None:
    rng = random.Random(seed)
    k_cache, v_cache = caches(storage, NUM_BLOCKS, block_size, heads, dim, dim, dtype)
    slots = rng.sample(range(NUM_BLOCKS * block_size), rng.randrange(NUM_BLOCKS * block_size + 1))
    slots = [-1 if rng.random() < skip else slot for slot in slots]
    g = torch.Generator().manual_seed(seed)
    # A projection's output: k and v are slices of one matrix.
    fused = torch.randn(len(slots), 3 * heads, dim, generator=g).to(dtype)
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    whole = [cache._base if cache._base is not None else cache for cache in (k_cache, v_cache)]
    expected = _expected(k_cache, k, slots), _expected(v_cache, v, slots)
    around = [memory.clone() for memory in whole]

    append_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))

    assert torch.equal(bits(k_cache), bits(expected[0]))
    assert torch.equal(bits(v_cache), bits(expected[1]))
    # Put the old contents back through the views: the rest of the memory must not have changed.
    for memory, old in zip(whole, around, strict=True):
        for cache in (k_cache, v_cache):
            if (cache._base if cache._base is not None else cache) is memory:
                cache.copy_(old.as_strided(cache.shape, cache.stride(), cache.storage_offset()))
        assert torch.equal(bits(memory), bits(old)), "memory outside the cache view was written"


def test_rows_past_the_slots_are_padding_and_too_few_rows_an_error() -> None:
    """vLLM pads k and v beyond the slot mapping: the mapping's length counts."""
    k_cache, v_cache = caches("nhd", 4, 16, 2, 64, 64, torch.float32)
    k, v = torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    append_kv(k, v, k_cache, v_cache, torch.tensor([3, 17]))
    assert torch.equal(k_cache[0, 3], k[0]) and torch.equal(v_cache[1, 1], v[1])
    assert int((~torch.isnan(k_cache[..., 0]) & ~torch.isinf(k_cache[..., 0])).sum()) == 2 * 2
    with pytest.raises(ValueError, match=r"k\.shape=\(5, 2, 64\): expected .*6"):
        append_kv(k, v, k_cache, v_cache, torch.arange(6))


@pytest.mark.parametrize("argument", ["v", "k_cache", "v_cache"])
def test_dtypes_must_agree(argument: str) -> None:
    k_cache, v_cache = caches("nhd", 4, 16, 2, 64, 64, torch.float32)
    tensors = {"k": torch.randn(2, 2, 64), "v": torch.randn(2, 2, 64), "k_cache": k_cache, "v_cache": v_cache}
    tensors[argument] = tensors[argument].to(torch.bfloat16)
    with pytest.raises((TypeError, ValueError), match=r"bfloat16.*|.*bfloat16"):
        append_kv(**tensors, slot_mapping=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("argument", "bad", "word"),
    [
        ("k", torch.zeros(2, 3, 64), "k"),
        ("v", torch.zeros(2, 2, 80), "v"),
        ("k", torch.zeros(2, 64), "k"),
        ("k_cache", torch.zeros(4, 16, 2, 128)[..., ::2], "k_cache"),
        ("slot_mapping", torch.zeros(2, dtype=torch.float32), "slot_mapping"),
        ("slot_mapping", torch.zeros(1, 2, dtype=torch.int64), "slot_mapping"),
        ("k", [[1.0]], "k"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(argument: str, bad: object, word: str) -> None:
    k_cache, v_cache = caches("nhd", 4, 16, 2, 64, 64, torch.float32)
    arguments: dict[str, object] = {
        "k": torch.zeros(2, 2, 64),
        "v": torch.zeros(2, 2, 64),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.tensor([0, 1]),
    }
    arguments[argument] = bad
    with pytest.raises((TypeError, ValueError), match=rf"\b{word}\b"):
        append_kv(**arguments)  # type: ignore[arg-type]


def test_a_slot_beyond_the_cache_is_refused_when_validation_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_VALIDATE", "1")
    k_cache, v_cache = caches("nhd", 4, 16, 2, 64, 64, torch.float32)
    with pytest.raises(ValueError, match=r"slot_mapping.*64"):
        append_kv(torch.zeros(2, 2, 64), torch.zeros(2, 2, 64), k_cache, v_cache, torch.tensor([1, 64]))
