"""Blocks that are not the sequence from 0: causality, windows and hooks use the logical position of each key."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from attnloom.core.layout import BlockSparseLayout
from tests.core import kernels
from tests.core.planning import indptr
from tests.core.problem import Problem, make_problem
from tests.core.running import check
from tests.core.storage import caches
from tests.core.variant_cases import ALIBI
from tests.oracle import Band, DenseRequest, attention, gather
from tests.tolerance import assert_lse, assert_out

F32 = kernels.Plain(torch.float32, 64)


def with_positions(problem: Problem, seed: int = 0) -> Problem:
    """The same blocks, standing apart: the gaps between them are pages that a selection left out."""
    rng = random.Random(seed)
    size, stride = problem.layout.block_size, problem.layout.index_stride
    positions = torch.full_like(problem.layout.indices, -7)
    for r, ids in enumerate(problem.block_ids):
        at = rng.randrange(3) * size
        for i in range(len(ids)):
            positions[int(problem.layout.starts[r]) + i * stride] = at
            at += size * rng.choice((1, 1, 2, 5))
    return dataclasses.replace(problem, layout=dataclasses.replace(problem.layout, positions=positions))


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (None, None), (60, 0), (30, 30), (0, 0)])
@pytest.mark.parametrize("num_workers", [1, 7])
def test_positions(block_size: int, left: int | None, right: int | None, num_workers: int) -> None:
    problem = with_positions(make_problem([1, 20, 50, 3], [200, 130, 300, 0], block_size=block_size, table="scattered"))
    engine = kernels.plain_engine(F32, 4, 2, left, right)
    check(engine, problem, problem.answer(Band(left, right)), num_workers=num_workers)


def test_rising_positions_from_zero_equal_none() -> None:
    problem = make_problem([1, 20], [200, 130], table="scattered")
    positions = torch.zeros_like(problem.layout.indices)
    for r, ids in enumerate(problem.block_ids):
        start = int(problem.layout.starts[r])
        positions[start : start + len(ids)] = torch.arange(len(ids), dtype=torch.int32) * 16
    explicit = dataclasses.replace(problem, layout=dataclasses.replace(problem.layout, positions=positions))
    check(kernels.plain_engine(F32, 4, 2, 50, 0), explicit, problem.answer(Band(50, 0)), num_workers=3)


def test_a_window_excludes_selected_pages_that_lie_too_far_back() -> None:
    """The last page stands a thousand positions after the others: a window of 40 keys sees nothing but it."""
    problem = make_problem([1], [64], table="scattered")
    positions = torch.zeros_like(problem.layout.indices)
    start = int(problem.layout.starts[0])
    positions[start : start + 4] = torch.tensor([0, 16, 32, 1048], dtype=torch.int32)
    problem = dataclasses.replace(problem, layout=dataclasses.replace(problem.layout, positions=positions))
    answer = problem.answer(Band(39, 0))
    assert answer.visible.tolist() == [16]
    check(kernels.plain_engine(F32, 4, 2, 39, 0), problem, answer, num_workers=3)


def test_positions_reach_the_hooks() -> None:
    """ALiBi's bias is a function of the distance in positions, not in slots."""
    problem = make_problem([1, 20], [200, 130], num_qo_heads=6, block_size=16, table="scattered")
    problem = with_positions(problem)
    answer = problem.answer(ALIBI.band, ALIBI.hooks)
    check(kernels.engine_of(ALIBI.variant), problem, answer, num_workers=5, params=ALIBI.params)


@pytest.mark.parametrize("num_workers", [1, 7])
def test_a_block_mask_selects_pages(num_workers: int) -> None:
    """Importance masks: rows read some blocks of one cache; the last chosen block of a row is its newest."""
    block_size, num_blocks = 16, 24
    gen = torch.Generator().manual_seed(4)
    mask = torch.rand(3, num_blocks, generator=gen) < 0.4
    mask[2] = False
    k_cache, v_cache = caches("interleaved", num_blocks, block_size, 2, 64, 64, torch.float32)
    used = mask.any(0)
    for cache in (k_cache, v_cache):
        cache[used] = torch.randn(int(used.sum()), block_size, 2, 64, generator=gen)
    layout = BlockSparseLayout.from_mask(mask, block_size)
    qo_lens = [1, 5, 2]
    q = torch.randn(sum(qo_lens), 4, 64, generator=gen)
    requests, row = [], 0
    for n, chosen in zip(qo_lens, mask.tolist(), strict=True):
        blocks = [block for block, on in enumerate(chosen) if on]
        length = len(blocks) * block_size
        positions = [block * block_size + offset for block in blocks for offset in range(block_size)]
        k, v = gather(k_cache, blocks, length), gather(v_cache, blocks, length)
        requests.append(DenseRequest(q[row : row + n], k, v, positions))
        row += n
    engine = kernels.plain_engine(F32, 4, 2, None, 0)
    plan = engine.plan(indptr(qo_lens), layout, num_workers=num_workers)
    out, lse = engine.run(plan, q, k_cache, v_cache, return_lse=True)
    answer = attention(requests)
    assert_out(out, answer, 64, torch.float32)
    assert_lse(lse, answer, 64)
