"""Layouts that look up every so many entries of their indices; what lies between is poison and must not be read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attnloom
from attnloom import variants
from attnloom.core.attention import Attention
from attnloom.core.layout import BlockSparseLayout
from tests.core import kernels
from tests.core.problem import Problem, make_problem
from tests.core.running import check, run
from tests.core.test_attention_positions import with_positions
from tests.core.variant_cases import ALIBI, OUTPUT
from tests.oracle import Band, DenseRequest, attention
from tests.tolerance import assert_out

F32, BF16 = kernels.Plain(torch.float32, 64), kernels.Plain(torch.bfloat16, 128)

QUERIES, KEYS = [1, 1, 40, 5, 0, 9], [200, 1, 130, 320, 33, 0]
"""Decode and prefill; rows whose last block is full, or part full; a row without keys, and one without queries."""


def problem_of(kernel: kernels.Plain, block_size: int, index_stride: int) -> Problem:
    return make_problem(
        QUERIES,
        KEYS,
        head_dim=kernel.head_dim,
        dtype=kernel.dtype,
        block_size=block_size,
        index_stride=index_stride,
        table="scattered",
        seed=block_size + index_stride,
    )


@pytest.mark.parametrize("kernel", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("block_size", "index_stride"), [(1, 3), (3, 3), (16, 16), (16, 5), (16, 37), (64, 64), (64, 2)]
)
@pytest.mark.parametrize("num_workers", [1, 7])
def test_every_so_many_entries(kernel: kernels.Plain, block_size: int, index_stride: int, num_workers: int) -> None:
    problem = problem_of(kernel, block_size, index_stride)
    for left in (None, 20):
        engine = kernels.plain_engine(kernel, 4, 2, left, 0)
        check(engine, problem, problem.answer(Band(left, 0)), num_workers=num_workers)


@pytest.mark.parametrize("kernel", [F32, BF16], ids=str)
@pytest.mark.parametrize(("block_size", "index_stride"), [(1, 4), (16, 16), (16, 21)])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (60, 0), (30, 30)])
def test_positions_are_indexed_alike(
    kernel: kernels.Plain, block_size: int, index_stride: int, left: int | None, right: int
) -> None:
    problem = with_positions(problem_of(kernel, block_size, index_stride))
    check(kernels.plain_engine(kernel, 4, 2, left, right), problem, problem.answer(Band(left, right)), num_workers=5)


@pytest.mark.parametrize("index_stride", [1, 16])
def test_positions_reach_hooks_and_finished_states(index_stride: int) -> None:
    """ALiBi reads the positions of keys and queries; an output hook those of queries, when states are finished too."""
    problem = make_problem(
        [1, 20], [200, 130], num_qo_heads=6, block_size=16, index_stride=index_stride, table="scattered"
    )
    problem = with_positions(problem)
    answer = problem.answer(ALIBI.band, ALIBI.hooks)
    check(kernels.engine_of(ALIBI.variant), problem, answer, num_workers=5, params=ALIBI.params)
    answer = problem.answer(OUTPUT.band, OUTPUT.hooks)
    engine = kernels.engine_of(OUTPUT.variant)
    check(engine, problem, answer, num_workers=5, params=OUTPUT.params, slope=OUTPUT.slope)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=5)
    state = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params=OUTPUT.params, return_state=True)
    out = attnloom.finish_state(engine, plan, *state, params=OUTPUT.params)
    assert isinstance(out, torch.Tensor)
    assert_out(out, answer, engine.head_dim, engine.dtype, slope=OUTPUT.slope)


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_bits_of_a_layout_do_not_depend_on_its_stride(block_size: int) -> None:
    """The same blocks, side by side and apart."""
    apart = problem_of(F32, block_size, 11)
    starts, flat = [], []
    for ids in apart.block_ids:
        starts.append(len(flat))
        flat += ids
    beside = dataclasses.replace(
        apart,
        layout=BlockSparseLayout(
            block_size, torch.tensor(starts), apart.layout.lengths, torch.tensor(flat, dtype=torch.int32)
        ),
    )
    engine = kernels.plain_engine(F32, 4, 2)
    for one, other in zip(run(engine, apart, num_workers=3), run(engine, beside, num_workers=3), strict=True):
        assert torch.equal(one, other)


def test_the_compiled_operator_takes_the_stride() -> None:
    problem = problem_of(F32, 16, 16)
    engine = kernels.plain_engine(F32, 4, 2)
    plan = engine.plan(problem.qo_indptr, problem.layout)

    @torch.compile(backend="eager", fullgraph=True)
    def layer(q: torch.Tensor) -> torch.Tensor:
        return engine.run(plan, q, problem.k_cache, problem.v_cache)

    assert_out(layer(problem.q), problem.answer(), engine.head_dim, engine.dtype)


def _reading(indices: list[int], length: int, num_blocks: int, index_stride: int, start: int = 0) -> None:
    """A decode step of one row over blocks of 16."""
    layout = BlockSparseLayout(
        16,
        torch.tensor([start]),
        torch.tensor([length], dtype=torch.int32),
        torch.tensor(indices, dtype=torch.int32),
        index_stride=index_stride,
    )
    engine = kernels.plain_engine(F32, 4, 2)
    cache = torch.zeros(num_blocks, 16, 2, 64)
    engine.run(engine.plan(torch.tensor([0, 1], dtype=torch.int32), layout), torch.zeros(1, 4, 64), cache, cache)


def test_ids_that_are_looked_up_are_checked_and_others_are_not() -> None:
    _reading([2, -1, 99, 0], 32, 3, 3)
    with pytest.raises(ValueError, match=r"block 1 of row 0 is 3: expected 0 to 2"):
        _reading([2, 0, 0, 3], 32, 3, 3)
    with pytest.raises(ValueError, match=r"block 1 of row 0 is -1"):
        _reading([2, 0, 0, -1], 32, 3, 3)


@pytest.mark.parametrize(("length", "start"), [(33, 0), (17, 1), (1, 4), (1, -1), (1, 2**63 - 1)])
def test_a_row_that_leaves_the_indices(length: int, start: int) -> None:
    with pytest.raises(
        ValueError, match=rf"layout\.lengths\[0\]={length}: .* 4 indices hold from starts\[0\]={start} on"
    ):
        _reading([0, 0, 0, 0], length, 3, 3, start)


@pytest.mark.parametrize("index_stride", [2, 16])
def test_selected_pages_are_those_of_the_layout(index_stride: int) -> None:
    """Quest picks pages by their numbers in a row, StreamingLLM keeps the first and the last of them."""
    problem = make_problem([1, 1], [150, 64], block_size=16, index_stride=index_stride, table="scattered")
    pages = torch.tensor([[0, 4, 9], [3, 0, 0]])
    chosen = variants.select_pages(problem.layout, pages, torch.tensor([3, 1]))
    picked = [[0, 4, 9], [3]]
    assert chosen.index_stride == 1
    wanted = [[problem.block_ids[r][page] for page in numbers] for r, numbers in enumerate(picked)]
    starts = chosen.starts.tolist()
    assert [
        chosen.indices[start : start + len(ids)].tolist() for start, ids in zip(starts, wanted, strict=True)
    ] == wanted
    kept, _ = variants.streaming(problem.layout, [1, 1], 16, 20)
    blocks = [[0, 8, 9], [0, 2, 3]]
    wanted = [[problem.block_ids[r][block] for block in numbers] for r, numbers in enumerate(blocks)]
    starts = kept.starts.tolist()
    assert kept.index_stride == 1
    assert [
        kept.indices[start : start + len(ids)].tolist() for start, ids in zip(starts, wanted, strict=True)
    ] == wanted


def test_pages_of_a_token_table() -> None:
    """Slots of pages at any slot, in a view of the cache with a block at every slot; the last of them is used."""
    torch.manual_seed(3)
    page, lengths, queries = 16, [70, 1, 16, 100], [1, 1, 4, 33]
    slots = 40 + page * sum(-(-length // page) for length in lengths)
    free = [first for first in range(slots - page, 3, -page)]  # aligned to the end: pages begin at no multiple of 16
    assert free[0] % page != 0
    table = torch.full((6, 128), 2**31 - 1, dtype=torch.int32)
    keys, values = (torch.full((slots, 2, 64), torch.nan) for _ in range(2))
    rows, dense, q = [5, 0, 3, 2], [], torch.randn(sum(queries), 6, 64)
    for row, length, count, begin in zip(rows, lengths, queries, (0, 1, 2, 6), strict=True):
        used: list[int] = []
        for column in range(0, length, page):
            first = free.pop(0)
            table[row, column] = first
            used += range(first, first + min(page, length - column))
        keys[used], values[used] = torch.randn(2, length, 2, 64)
        dense.append(DenseRequest(q[begin : begin + count], keys[used], values[used], list(range(length))))
    layout = BlockSparseLayout.from_token_table(
        table, torch.tensor(rows), torch.tensor(lengths, dtype=torch.int32), page
    )
    assert layout.indices.data_ptr() == table.data_ptr()
    assert (layout.block_size, layout.index_stride) == (page, page)
    engine = Attention(6, 2, 64, dtype=torch.float32)
    view = [cache.unfold(0, page, 1).permute(0, 3, 1, 2) for cache in (keys, values)]
    indptr = torch.tensor([0, 1, 2, 6, 39], dtype=torch.int32)
    out = engine.run(engine.plan(indptr, layout), q, *view)
    assert_out(out, attention(dense), 64, torch.float32)
