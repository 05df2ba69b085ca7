"""What SGLang's batches become, without SGLang: steps, and windowed layers with a pool of their own over many."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import attnloom
from attnloom.adapters.token_table import TokenTable
from attnloom.backends.sglang.step import Pool, Steps
from attnloom.backends.sglang.windowed import WindowedSteps

ROWS, CONTEXT, REACH = 6, 64, 9


def batch(**fields: Any) -> Any:
    """The fields of a ForwardBatch that steps read; lengths as SGLang types them, none on the host."""
    names = ("seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu", "encoder_lens", "spec_info")
    return SimpleNamespace(**{**dict.fromkeys(names), "batch_size": len(fields["req_pool_indices"]), **fields})


def steps(page_size: int = 1) -> tuple[torch.Tensor, Steps]:
    table = torch.arange((ROWS + 1) * CONTEXT, dtype=torch.int32).view(ROWS + 1, CONTEXT)
    return table, Steps(table, ROWS, CONTEXT, page_size)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_has_a_query_for_each_request(dtype: torch.dtype) -> None:
    table, made = steps()
    step = made.decode(batch(req_pool_indices=torch.tensor([3, 1]), seq_lens=torch.tensor([9, 40], dtype=dtype)))
    layout = step.layouts[Pool.FULL]
    assert step.qo_indptr.tolist() == [0, 1, 2] and not step.extend
    assert layout.indices.data_ptr() == table.data_ptr()
    assert layout.starts.tolist() == [3 * CONTEXT, CONTEXT] and layout.lengths.tolist() == [9, 40]


def test_extend_takes_the_last_tokens_and_skips_the_encoder() -> None:
    _, made = steps()
    step = made.extend(
        batch(
            req_pool_indices=torch.tensor([2, 5, 1]),
            seq_lens=torch.tensor([9, 4, 7]),
            extend_seq_lens=torch.tensor([2, 4, 1], dtype=torch.int32),
            encoder_lens=torch.tensor([3, 0, 5]),
        )
    )
    assert step.qo_indptr.tolist() == [0, 2, 6, 7] and step.extend
    assert step.layouts[Pool.FULL].starts.tolist() == [2 * CONTEXT + 3, 5 * CONTEXT, CONTEXT + 5]
    assert step.layouts[Pool.ENCODER].starts.tolist() == [2 * CONTEXT, 5 * CONTEXT, CONTEXT]
    assert step.layouts[Pool.ENCODER].lengths.tolist() == [3, 0, 5]


def test_verify_adds_drafts_to_lengths_and_needs_no_mask_for_a_chain() -> None:
    _, made = steps()
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1).flatten()
    for topk, masked in ((1, False), (2, True)):
        info = SimpleNamespace(draft_token_num=3, topk=topk, custom_mask=mask)
        step = made.verify(batch(req_pool_indices=torch.tensor([1, 2]), seq_lens=torch.tensor([5, 8]), spec_info=info))
        assert step.qo_indptr.tolist() == [0, 3, 6]
        assert step.kv_lens.tolist() == [8, 11]
        assert bool(step.tree) == masked


def test_pages_are_blocks_but_where_they_may_be_none() -> None:
    """A paged pool: every kind of step reads pages, but trees of drafts and texts behind an encoder's tokens."""
    table, made = steps(16)
    fields = {"req_pool_indices": torch.tensor([1, 2]), "seq_lens": torch.tensor([5, 8])}
    drafts = {"draft_token_num": 3, "custom_mask": torch.eye(3, dtype=torch.bool).repeat(2, 1).flatten()}
    extend = {**fields, "extend_seq_lens": torch.tensor([2, 1], dtype=torch.int32)}
    for step, size in (
        (made.decode(batch(**fields)), 16),
        (made.extend(batch(**extend)), 16),
        (made.verify(batch(**fields, spec_info=SimpleNamespace(topk=1, **drafts))), 16),
        (made.verify(batch(**fields, spec_info=SimpleNamespace(topk=2, **drafts))), 1),
        (made.verify(batch(**fields, spec_info=SimpleNamespace(**drafts))), 1),
        (made.branches(batch(**fields), 1, 2), 16),
        (made.branches(batch(**fields), 2, 5), 1),
        (made.extend(batch(**extend, encoder_lens=torch.tensor([16, 0]))), 1),
    ):
        for layout in step.layouts.values():
            assert (layout.block_size, layout.index_stride) == (size, size)
            assert layout.indices.data_ptr() == table.data_ptr()


def test_a_mask_in_a_buffer_for_more_requests_has_no_prefix() -> None:
    """The buffer that SGLang was given is longer than the step's mask, as one with the prefix is."""
    _, made = steps()
    buffer = torch.zeros(100, dtype=torch.bool)
    buffer[:18] = torch.eye(3, dtype=torch.bool).repeat(2, 1).flatten()
    info = SimpleNamespace(draft_token_num=3, topk=2, custom_mask=buffer)
    fields = {"req_pool_indices": torch.tensor([1, 2]), "seq_lens": torch.tensor([5, 8]), "spec_info": info}
    step = made.verify(batch(**fields), buffer)
    bits = step.tree["packed_mask"]
    assert [int(bits[bit // 8]) >> bit % 8 & 1 for bit in range(18)] == buffer[:18].int().tolist()


def test_one_plan_for_all_layers_with_a_key() -> None:
    _, made = steps()
    engine = attnloom.Attention(4, 2, 64, dtype=torch.float32)
    step = made.decode(batch(req_pool_indices=torch.tensor([3]), seq_lens=torch.tensor([9])))
    plan = step.plan(Pool.FULL, engine.plan_key, engine, {})
    assert step.plan(Pool.FULL, engine.plan_key, engine, {}) is plan
    assert plan.total_q == 1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("sees_every_step", [True, False])
def test_windowed_slots_through_the_life_of_a_server(sees_every_step: bool, page_size: int) -> None:
    """Requests come and go, prompts get other slots after they ran; what windows see is right in every step."""
    draw = random.Random(7)
    table = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
    windowed = WindowedSteps(TokenTable.of(table), REACH, sees_every_step=sees_every_step)
    mapping = torch.zeros(100_000, dtype=torch.int64)
    used = page_size
    running: dict[int, int] = {}
    whole = 0

    def allocate(row: int, first: int, last: int) -> None:
        """Slots that nobody had, in both pools; a part full page goes on behind its last slot."""
        nonlocal used
        for column in range(first, last):
            offset = column % page_size
            if offset:
                slot, other = int(table[row, column - offset]), int(mapping[int(table[row, column - offset])])
            else:
                slot, other = used, int(torch.randint(1, 1000, ())) * page_size
                used += page_size
            table[row, column] = slot + offset
            mapping[slot + offset] = other + offset

    for step in range(400):
        free = [row for row in range(ROWS) if row not in running]
        begin = bool(free) and (not running or draw.random() < 0.2)
        if begin:
            rows = draw.sample(free, draw.randint(1, len(free)))
            queries = [draw.randint(1, 30) for _ in rows]
            running |= dict(zip(rows, queries, strict=True))
        else:
            rows, queries = list(running), [1] * len(running)
            running = {row: length + 1 for row, length in running.items()}
        for row, count in zip(rows, queries, strict=True):
            allocate(row, running[row] - count, running[row])
            left = max(0, running[row] - count - REACH) // page_size * page_size
            mapping[table[row, :left].long()] = 0  # the pool has forgotten them
        lengths = torch.tensor([running[row] for row in rows], dtype=torch.int32)
        counts = torch.tensor(queries, dtype=torch.int32)
        with patch.object(windowed.table, "after_any_step", wraps=windowed.table.after_any_step) as anew:
            layout = windowed.layout(
                torch.tensor(rows), lengths, counts, mapping, decode=not begin, page_size=page_size
            )
        whole += anew.call_count
        for row, count, start, length in zip(rows, queries, layout.starts.tolist(), lengths.tolist(), strict=True):
            columns = range(max(0, length - count - REACH), length)
            expected = mapping[table[row].long()][columns.start : columns.stop].tolist()
            blocks = [int(layout.indices[start + column // page_size * layout.index_stride]) for column in columns]
            found = [block + column % page_size for block, column in zip(blocks, columns, strict=True)]
            assert found == expected, (step, row)
        if begin:  # SGLang finds the same prompt in its cache, and gives the request those slots
            for row in rows:
                allocate(row, 0, running[row])
        running = {row: length for row, length in running.items() if length < CONTEXT - 1 and draw.random() > 0.03}
    assert whole == 400 if not sees_every_step else 100 < whole < 300
