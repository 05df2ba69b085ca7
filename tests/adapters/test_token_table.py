"""Token tables are layouts as they lie, and the engine reads what they point to."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom.adapters.slot_translation import TranslatedTable
from attnloom.adapters.token_table import TokenTable, slot_cache
from tests.oracle import Answer, Band, DenseRequest, attention, gather
from tests.tolerance import assert_out

HEADS, KV_HEADS, DIM = 6, 2, 64
QUERIES, KEYS = (1, 5, 0, 3), (40, 5, 7, 130)
ROWS = (4, 1, 6, 2)
SLOTS, PITCH = 400, 160


def table_of(rows: tuple[int, ...], lengths: tuple[int, ...], first: int = 0, page_size: int = 1) -> torch.Tensor:
    """A token table with more rows and columns than the step needs; pages in any order, entries of others are -1."""
    table = torch.full((8, PITCH), -1, dtype=torch.int32)
    free = torch.randperm(SLOTS // page_size).to(torch.int32) * page_size
    taken = 0
    for row, length in zip(rows, lengths, strict=True):
        pages = -(-(first + length) // page_size)
        slots = free[taken : taken + pages, None] + torch.arange(page_size, dtype=torch.int32)
        table[row, : first + length] = slots.flatten()[: first + length]
        taken += pages
    return table


def first_of_pages(table: torch.Tensor, page_size: int) -> torch.Tensor:
    """The table with nothing but the first slots of pages: other entries are no slots."""
    bare = torch.full_like(table, 2**31 - 1)
    bare[:, ::page_size] = table[:, ::page_size]
    return bare


def poisoned(table: torch.Tensor) -> torch.Tensor:
    """A cache ``[slots, KV_HEADS, DIM]`` that is NaN wherever the table does not point."""
    cache = torch.full((SLOTS, KV_HEADS, DIM), torch.nan)
    used = table[table >= 0].long()
    cache[used] = torch.randn(len(used), KV_HEADS, DIM)
    return cache


def indptr_of(queries: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([sum(queries[:count]) for count in range(len(queries) + 1)], dtype=torch.int32)


def expected(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: list[list[int]],
    queries: tuple[int, ...],
    band: Band,
) -> Answer:
    requests = []
    for request, (own, count) in enumerate(zip(slots, queries, strict=True)):
        begin = sum(queries[:request])
        parts = [gather(slot_cache(cache), own, len(own)) for cache in (keys, values)]
        requests.append(DenseRequest(q[begin : begin + count], *parts, list(range(len(own)))))
    return attention(requests, band=band)


def test_a_layout_points_into_the_table() -> None:
    table = torch.arange(8 * PITCH, dtype=torch.int32).view(8, PITCH)
    lengths = torch.tensor([33, 0, 80], dtype=torch.int32)
    layout = TokenTable.of(table).layout(torch.tensor([5, 0, 7]), lengths)
    assert (layout.block_size, layout.index_stride) == (1, 1)
    assert layout.indices.data_ptr() == table.data_ptr()
    assert layout.lengths.data_ptr() == lengths.data_ptr()
    assert layout.starts.tolist() == [5 * PITCH, 0, 7 * PITCH]
    pages = TokenTable.of(table).layout(torch.tensor([5, 0, 7]), lengths, page_size=32)
    assert (pages.block_size, pages.index_stride) == (32, 32)
    assert pages.indices.data_ptr() == table.data_ptr()
    assert pages.starts.tolist() == layout.starts.tolist()


@pytest.mark.parametrize("block_size", [1, 5, 12])
def test_a_cache_has_a_block_at_every_slot_and_ends_with_the_last(block_size: int) -> None:
    whole = torch.arange(2 * 12 * 3 * 4).view(2, 12, 3, 4)
    for cache in (whole[1], whole[1].transpose(0, 1).contiguous().transpose(0, 1), whole[1, :, 1:, ::2]):
        blocks = slot_cache(cache, block_size)
        assert blocks.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert blocks.shape == (12 - block_size + 1, block_size, *cache.shape[1:])
        for slot in range(blocks.shape[0]):
            assert torch.equal(blocks[slot], cache[slot : slot + block_size])


def test_what_is_no_cache_of_slots_is_named() -> None:
    with pytest.raises(ValueError, match=r"block_size=13: expected at most 12, the slots"):
        slot_cache(torch.zeros(12, 2, 64), 13)
    with pytest.raises(ValueError, match="block_size=0: expected at least 1"):
        slot_cache(torch.zeros(12, 2, 64), 0)
    with pytest.raises(ValueError, match=r"cache\.shape"):
        slot_cache(torch.zeros(12, 2, 64, 1), 4)


def test_a_page_size_that_is_none_is_named() -> None:
    table = TokenTable.of(torch.zeros(4, PITCH, dtype=torch.int32))
    for size, error in ((0, ValueError), (-16, ValueError), (16.0, TypeError)):
        with pytest.raises(error, match="block_size"):
            table.layout(torch.tensor([1]), torch.tensor([3], dtype=torch.int32), page_size=size)  # type: ignore[arg-type]


def test_a_table_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match="table"):
        TokenTable.of(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="table"):
        TokenTable.of(torch.zeros(4, 8, dtype=torch.int32)[:, :4])


def test_a_row_outside_of_the_table_is_an_error() -> None:
    """The engine checks what a plan points to before anything runs."""
    table = torch.zeros(4, PITCH, dtype=torch.int32)
    engine = attnloom.Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32)
    layout = TokenTable.of(table).layout(torch.tensor([4]), torch.tensor([3], dtype=torch.int32))
    plan = engine.plan(torch.tensor([0, 1], dtype=torch.int32), layout)
    cache = slot_cache(torch.zeros(SLOTS, KV_HEADS, DIM))
    with pytest.raises(ValueError, match="layout"):
        engine.run(plan, torch.zeros(1, HEADS, DIM), cache, cache)


def test_a_page_that_reaches_past_the_cache_is_an_error() -> None:
    """Slots of the last page of a cache whose size is no multiple of pages."""
    table = torch.full((4, PITCH), SLOTS - 15, dtype=torch.int32)
    engine = attnloom.Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32)
    layout = TokenTable.of(table).layout(torch.tensor([1]), torch.tensor([3], dtype=torch.int32), page_size=16)
    plan = engine.plan(torch.tensor([0, 1], dtype=torch.int32), layout)
    cache = slot_cache(torch.zeros(SLOTS, KV_HEADS, DIM), 16)
    with pytest.raises(ValueError, match=rf"block 0 of row 0 is {SLOTS - 15}: expected 0 to {SLOTS - 16}"):
        engine.run(plan, torch.zeros(1, HEADS, DIM), cache, cache)
    with pytest.raises(ValueError, match=r"k_cache\.shape"):
        engine.run(plan, torch.zeros(1, HEADS, DIM), slot_cache(torch.zeros(SLOTS, KV_HEADS, DIM)), cache)


@pytest.mark.parametrize(("first", "page_size"), [(0, 1), (9, 1), (0, 4), (0, 16), (16, 16), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_attention_over_a_token_table(first: int, page_size: int, dtype: torch.dtype) -> None:
    """Rows in any order; with an encoder's tokens at the beginning of each, which self attention does not see."""
    torch.manual_seed(0)
    table = table_of(ROWS, KEYS, first, page_size)
    keys, values = poisoned(table), poisoned(table)
    q = torch.randn(sum(QUERIES), HEADS, DIM)
    rows, lengths = torch.tensor(ROWS, dtype=dtype), torch.tensor(KEYS, dtype=torch.int32)
    seen = TokenTable.of(first_of_pages(table, page_size))
    layout = seen.layout(rows, lengths, torch.full((len(ROWS),), first) if first else None, page_size)
    engine = attnloom.Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32)
    plan = engine.plan(indptr_of(QUERIES), layout)
    out = engine.run(plan, q, slot_cache(keys, page_size), slot_cache(values, page_size))
    slots = [table[row, first : first + length].tolist() for row, length in zip(ROWS, KEYS, strict=True)]
    assert_out(out, expected(q, keys, values, slots, QUERIES, Band()), DIM, torch.float32)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [1, 24, 64])
def test_attention_over_translated_slots(window: int, page_size: int) -> None:
    """Steps one after the other; before each, pages that left every window are unmapped and their slots poisoned."""
    torch.manual_seed(1)
    full = table_of(ROWS, KEYS, page_size=page_size)
    table = TranslatedTable(TokenTable.of(first_of_pages(full, page_size)))
    mapping = torch.zeros(SLOTS, dtype=torch.int64)
    others = torch.randperm(SLOTS // page_size)[:, None] * page_size + torch.arange(page_size)
    others = others.flatten()
    engine = attnloom.Attention(
        HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=attnloom.variants.SlidingWindow(window)
    )
    rows = torch.tensor(ROWS)
    done = [0, 0, 0, 0]
    for queries in ((30, 5, 7, 100), (9, 0, 0, 29), (1, 0, 0, 1)):
        lengths = [before + count for before, count in zip(done, queries, strict=True)]
        mapping.zero_()
        keys, values = (torch.full((SLOTS, KV_HEADS, DIM), torch.nan) for _ in range(2))
        for row, before, length in zip(ROWS, done, lengths, strict=True):
            begin = max(0, before - window + 1)
            mapped = full[row, begin // page_size * page_size : length].long()
            mapping[mapped] = others[mapped]
            seen = full[row, begin:length].long()
            for cache in (keys, values):
                cache[others[seen]] = torch.randn(len(seen), KV_HEADS, DIM)
        lens = torch.tensor(lengths, dtype=torch.int32)
        columns = torch.tensor(queries, dtype=torch.int32) + window - 1
        layout = table.after_any_step(rows, lens, columns, mapping, page_size)
        q = torch.randn(sum(queries), HEADS, DIM)
        plan = engine.plan(indptr_of(queries), layout)
        out = engine.run(plan, q, slot_cache(keys, page_size), slot_cache(values, page_size))
        # The oracle would multiply what it masks: keys outside of every window are zero for it.
        slots = [others[full[row, :length].long()].tolist() for row, length in zip(ROWS, lengths, strict=True)]
        wanted = expected(q, keys.nan_to_num(), values.nan_to_num(), slots, queries, Band(left=window - 1))
        assert_out(out, wanted, DIM, torch.float32)
        done = lengths


def test_a_step_translates_windows_and_not_texts() -> None:
    full = torch.arange(8 * PITCH, dtype=torch.int32).view(8, PITCH)
    table = TranslatedTable(TokenTable.of(full))
    mapping = torch.arange(8 * PITCH) + 1
    lengths, columns = torch.tensor([100, 2], dtype=torch.int32), torch.tensor([5, 4], dtype=torch.int32)
    layout = table.after_any_step(torch.tensor([1, 3]), lengths, columns, mapping)
    written = layout.indices.nonzero().flatten().tolist()
    assert written == [PITCH + column for column in range(95, 100)] + [3 * PITCH, 3 * PITCH + 1]
    assert layout.indices[written].tolist() == [slot + 1 for slot in written]


def test_a_step_of_new_tokens_translates_those() -> None:
    full = torch.arange(8 * PITCH, dtype=torch.int32).view(8, PITCH)
    table = TranslatedTable(TokenTable.of(full))
    lengths = torch.tensor([100, 1], dtype=torch.int32)
    layout = table.after_new_tokens(torch.tensor([1, 3]), lengths, torch.arange(8 * PITCH) + 1)
    assert layout.indices.nonzero().flatten().tolist() == [PITCH + 99, 3 * PITCH]
    assert layout.indices[[PITCH + 99, 3 * PITCH]].tolist() == [PITCH + 100, 3 * PITCH + 1]


def test_of_a_page_its_first_slot_is_translated() -> None:
    full = torch.arange(8 * PITCH, dtype=torch.int32).view(8, PITCH)
    mapping = torch.arange(8 * PITCH) + 16
    rows, lengths = torch.tensor([1, 3]), torch.tensor([100, 16], dtype=torch.int32)
    table = TranslatedTable(TokenTable.of(full))
    layout = table.after_any_step(rows, lengths, torch.tensor([5, 1], dtype=torch.int32), mapping, 16)
    assert (layout.block_size, layout.index_stride) == (16, 16)
    assert layout.indices.nonzero().flatten().tolist() == [PITCH + 80, PITCH + 96, 3 * PITCH]
    assert layout.indices[PITCH + 80] == PITCH + 96
    layout = table.after_new_tokens(rows, lengths + 1, mapping, 16)
    assert layout.indices.nonzero().flatten().tolist() == [PITCH + 80, PITCH + 96, 3 * PITCH, 3 * PITCH + 16]
    assert layout.indices[3 * PITCH + 16] == 3 * PITCH + 32
