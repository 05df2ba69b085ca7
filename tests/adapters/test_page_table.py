"""Page tables become layouts without a copy, and the engine reads pages and ragged tensors alike."""

from __future__ import annotations

import itertools

import pytest
import torch

import attnloom
from attnloom.adapters.page_table import paged_layout, ragged_layout, split_interleaved_cache
from tests.oracle import Band, DenseRequest, attention
from tests.tolerance import assert_out

HEADS, KV_HEADS, DIM = 6, 2, 64
QUERIES, KEYS = (1, 5, 0, 3), (40, 5, 7, 130)


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def test_paged_layout_points_into_the_table() -> None:
    """A table as vLLM keeps it: more rows and columns than the step needs, and a row stride of its own."""
    table = torch.arange(8 * 12, dtype=torch.int32).view(8, 12)[:, :10]
    lengths = torch.tensor([33, 0, 80], dtype=torch.int32)
    layout = paged_layout(table, lengths, 16)
    assert layout.block_size == 16
    assert layout.indices.data_ptr() == table.data_ptr()
    assert layout.lengths.data_ptr() == lengths.data_ptr()
    assert layout.starts.tolist() == [0, 12, 24]
    first = int(layout.starts[2])
    assert layout.indices[first : first + 5].tolist() == table[2, :5].tolist()


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4, dtype=torch.int64), torch.zeros(12, dtype=torch.int32)])
def test_paged_layout_names_a_wrong_table(wrong: torch.Tensor) -> None:
    with pytest.raises((TypeError, ValueError), match="block_table"):
        paged_layout(wrong, torch.ones(3, dtype=torch.int32), 16)


def test_ragged_layout_is_one_block_a_token() -> None:
    layout = ragged_layout(torch.tensor([0, 3, 3, 7], dtype=torch.int32))
    assert layout.block_size == 1
    assert layout.starts.tolist() == [0, 3, 3]
    assert layout.lengths.tolist() == [3, 0, 4]
    assert layout.indices.tolist() == list(range(7))


def test_split_shares_memory_and_keeps_strides() -> None:
    cache = torch.zeros(5, KV_HEADS, 16, 2 * DIM)
    keys, values = split_interleaved_cache(cache, DIM)
    assert keys.shape == values.shape == (5, 16, KV_HEADS, DIM)
    assert keys.stride() == values.stride() == (KV_HEADS * 16 * 2 * DIM, 2 * DIM, 16 * 2 * DIM, 1)
    values[2, 3, 1, 4] = 1.0
    assert cache[2, 1, 3, DIM + 4] == 1.0
    assert keys.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(5, 2, 16), (5, 2, 16, DIM)])
def test_split_names_a_wrong_cache(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cache must be"):
        split_interleaved_cache(torch.zeros(shape), DIM)


@pytest.mark.parametrize("token_major", [False, True])
def test_attention_over_a_page_table(token_major: bool) -> None:
    """Both physical orders of vLLM's cache; pages in any order, what no request owns is NaN."""
    torch.manual_seed(0)
    page, pages = 32, 12
    if token_major:
        cache = torch.full((pages, page, KV_HEADS, 2 * DIM), torch.nan).transpose(1, 2)
    else:
        cache = torch.full((pages, KV_HEADS, page, 2 * DIM), torch.nan)
    keys, values = split_interleaved_cache(cache, DIM)
    table = torch.full((6, 8), -1, dtype=torch.int32)
    free = iter(torch.randperm(pages).tolist())
    slots = []
    for row, length in enumerate(KEYS):
        for column in range(-(-length // page)):
            table[row, column] = next(free)
        slots += [int(table[row, at // page]) * page + at % page for at in range(length)]
    new_keys, new_values = torch.randn(2, sum(KEYS), KV_HEADS, DIM)
    attnloom.append_kv(new_keys, new_values, keys, values, torch.tensor(slots))

    layout = paged_layout(table, torch.tensor(KEYS, dtype=torch.int32), page)
    check(layout, keys, values, new_keys, new_values, attnloom.variants.Causal(), Band(None, 0))


def test_attention_over_ragged_keys_and_values() -> None:
    """Encoder-only: k and v are slices of one fused projection, read where they lie; windows reach both ways."""
    torch.manual_seed(1)
    fused = torch.randn(sum(KEYS), 3, KV_HEADS, DIM)
    keys, values = fused[:, 1], fused[:, 2]
    layout = ragged_layout(offsets(KEYS))
    variant = attnloom.variants.SlidingWindow(9, symmetric=True)
    check(layout, keys.unsqueeze(1), values.unsqueeze(1), keys, values, variant, Band(8, 8))


def check(
    layout: attnloom.BlockSparseLayout,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    variant: attnloom.Variant,
    band: Band,
) -> None:
    """The engine over the layout agrees with the oracle over the same keys and values, dense."""
    q = torch.randn(sum(QUERIES), HEADS, DIM)
    engine = attnloom.Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=variant)
    plan = engine.plan(offsets(QUERIES), layout, num_workers=3)
    out = engine.run(plan, q, k_cache, v_cache)
    requests = [
        DenseRequest(queries, k, v, list(range(k.shape[0])))
        for queries, k, v in zip(q.split(QUERIES), keys.split(KEYS), values.split(KEYS), strict=True)
    ]
    assert_out(out, attention(requests, band=band), DIM, torch.float32)
