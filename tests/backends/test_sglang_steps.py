"""What SGLang's batches become, without SGLang: steps, and windowed layers with a pool of their own over many."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import attnloom
from attnloom.adapters.draft_tree import branch_masks, draft_columns
from attnloom.adapters.token_table import TokenTable
from attnloom.backends.sglang.step import Pool, Step, Steps
from attnloom.backends.sglang.verified import VerifiedTrees
from attnloom.backends.sglang.windowed import HostWindowedSteps, WindowedSteps

ROWS, CONTEXT, REACH = 6, 64, 9


def batch(**fields: Any) -> Any:
    """The fields of a ForwardBatch that steps read; lengths as SGLang types them, none on the host."""
    names = ("seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu", "encoder_lens", "spec_info")
    return SimpleNamespace(**{**dict.fromkeys(names), "batch_size": len(fields["req_pool_indices"]), **fields})


def steps(page_size: int = 1) -> tuple[torch.Tensor, Steps]:
    table = torch.arange((ROWS + 1) * CONTEXT, dtype=torch.int32).view(ROWS + 1, CONTEXT)
    return table, Steps(table, ROWS, page_size)


def trees() -> VerifiedTrees:
    return VerifiedTrees(ROWS, torch.device("cpu"))


def bits_of(params: dict[str, torch.Tensor], count: int) -> list[int]:
    return [int(params["packed_mask"][bit // 8]) >> bit % 8 & 1 for bit in range(count)]


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
        given = batch(req_pool_indices=torch.tensor([1, 2]), seq_lens=torch.tensor([5, 8]), spec_info=info)
        step, seen = made.verify(given), trees()
        assert step.qo_indptr.tolist() == [0, 3, 6] and step.most == 3
        assert step.kv_lens.tolist() == [8, 11]
        seen.stage(given)
        assert bool(seen.params(given)) == masked


def test_a_mask_that_sglang_filled_in_place_is_read_there() -> None:
    """The buffer that SGLang was given is longer than the step's mask, as one with the prefix is."""
    seen = trees()
    buffer = seen.mask(3)
    buffer[:18] = torch.eye(3, dtype=torch.bool).repeat(2, 1).flatten()
    info = SimpleNamespace(draft_token_num=3, topk=2, custom_mask=buffer)
    given = batch(req_pool_indices=torch.tensor([1, 2]), seq_lens=torch.tensor([5, 8]), spec_info=info)
    seen.stage(given)
    assert bits_of(seen.params(given), 18) == buffer[:18].int().tolist()


@pytest.mark.parametrize("whole", [False, True], ids=["drafts_only", "with_the_prefix"])
def test_a_mask_for_fewer_requests_than_a_graph_has(whole: bool) -> None:
    """A replay's batch is filled up; its mask is not. It goes where the graph reads, and nothing past it is read."""
    seen, drafts, prefixes = trees(), 3, [5, 8]
    masks = torch.rand(2, drafts, drafts) < 0.5
    rows = [
        torch.cat([torch.ones(drafts, prefix, dtype=torch.bool), mask], 1) if whole else mask
        for prefix, mask in zip(prefixes, masks, strict=True)
    ]
    info = SimpleNamespace(draft_token_num=drafts, topk=2, custom_mask=torch.cat([row.flatten() for row in rows]))
    lengths = torch.tensor([*prefixes, 1, 1])
    given = batch(req_pool_indices=torch.tensor([1, 2, 0, 0]), seq_lens=lengths, spec_info=info, num_padding=2)
    address = seen.mask(drafts).data_ptr()
    seen.stage(given)
    assert seen.mask(drafts).data_ptr() == address
    assert bits_of(seen.params(given), 18) == masks.flatten().int().tolist()


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


def on_device(table: torch.Tensor) -> Steps:
    """Steps as on a GPU, wherever the table lies."""
    made = Steps(table, ROWS, 4)
    made.on_device = True
    return made


def test_what_the_host_knows_of_a_step_on_a_gpu() -> None:
    """Query tokens are counted where the host has lengths; otherwise the batch's tokens bound them."""
    made = on_device(torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32))
    fields = {"req_pool_indices": torch.tensor([2, 5]), "seq_lens": torch.tensor([9, 4]), "input_ids": torch.zeros(8)}
    lens = torch.tensor([2, 4], dtype=torch.int32)
    known = made.extend(batch(**fields, extend_seq_lens=lens, extend_seq_lens_cpu=[2, 4]))
    assert (known.total_q, known.most, known.bound) == (6, 4, False)
    unknown = made.extend(batch(**fields, extend_seq_lens=lens))
    assert (unknown.total_q, unknown.most, unknown.bound) == (8, 8, True)
    decode = made.decode(batch(**fields))
    assert (decode.total_q, decode.most, decode.bound) == (2, 1, False)
    # SGLang's view of drafts that it replays has its buffers whole, and lengths elsewhere.
    info = SimpleNamespace(extend_seq_lens_tensor=torch.tensor([3, 3, 3]))
    view = SimpleNamespace(**fields, batch_size=1, encoder_lens=None, spec_info=info)
    replayed = made.extend(view)
    assert replayed.qo_indptr.tolist() == [0, 3] and replayed.kv_lens.tolist() == [9]


def test_nothing_is_read_back_from_a_gpu() -> None:
    """Tensors without content: whatever looks at one raises."""
    meta = torch.device("meta")
    made = on_device(torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32, device=meta))
    lengths = torch.zeros(2, dtype=torch.int64, device=meta)
    fields = {"req_pool_indices": lengths, "seq_lens": lengths, "input_ids": torch.zeros(8, device=meta)}
    seen = VerifiedTrees(ROWS, meta)
    mask = torch.zeros(300, dtype=torch.bool, device=meta)
    info = SimpleNamespace(draft_token_num=3, topk=2, custom_mask=mask)
    verified = batch(**fields, spec_info=info)
    assert draft_columns(mask, lengths, 3).shape == (18,)
    assert seen.params(verified)["packed_mask"].shape == (3,)
    assert branch_masks(lengths, 2, 3, 1)["mask_columns"].shape == (2,)
    mapping = torch.zeros(1000, dtype=torch.int64, device=meta)
    windowed = WindowedSteps(made.table, REACH)
    for step in (
        made.decode(batch(**fields)),
        made.verify(verified),
        made.extend(batch(**fields, extend_seq_lens=lengths.to(torch.int32))),
        made.branches(batch(**fields), 2, 4),
    ):
        windowed.translate(step, mapping, decode=False)
        assert windowed.layout(step).num_rows == step.layouts[Pool.FULL].num_rows == 2


def test_one_plan_for_all_layers_with_a_key() -> None:
    _, made = steps()
    engine = attnloom.Attention(4, 2, 64, dtype=torch.float32)
    step = made.decode(batch(req_pool_indices=torch.tensor([3]), seq_lens=torch.tensor([9])))
    plan = step.plan(Pool.FULL, engine.plan_key, engine, {})
    assert step.plan(Pool.FULL, engine.plan_key, engine, {}) is plan
    assert plan.total_q == 1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["compares", "alone", "on a gpu"])
def test_windowed_slots_through_the_life_of_a_server(kind: str, page_size: int) -> None:
    """Requests come and go, prompts get other slots after they ran; what windows see is right in every step."""
    draw = random.Random(7)
    table = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
    full = TokenTable.of(table)
    windowed = (
        WindowedSteps(full, REACH)
        if kind == "on a gpu"
        else HostWindowedSteps(full, REACH, sees_every_step=kind == "compares")
    )
    address = windowed.table.table.slots.data_ptr()
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
        indptr = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
        made = Step(indptr, None, max(queries), torch.tensor(rows), lengths, begin)
        made.layouts[Pool.FULL] = full.layout(made.rows, lengths, page_size=page_size)
        with patch.object(windowed.table, "after_any_step", wraps=windowed.table.after_any_step) as anew:
            windowed.translate(made, mapping, decode=not begin)
        layout = windowed.layout(made)
        assert layout.indices.data_ptr() == address
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
    assert {"alone": whole == 400, "compares": 100 < whole < 300, "on a gpu": whole == 0}[kind]
