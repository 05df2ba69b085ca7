"""Caches of any strides and block sizes, strided queries, gaps of poison between all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnloom.core.layout import BlockSparseLayout
from tests.core import kernels
from tests.core.planning import indptr
from tests.core.problem import make_problem
from tests.core.running import check
from tests.core.storage import STORAGES

QO_LENS = [1, 12, 3]
KV_LENS = [201, 12, 130]


@pytest.mark.parametrize("storage", sorted(STORAGES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_storage(storage: str, dtype: torch.dtype) -> None:
    problem = make_problem(QO_LENS, KV_LENS, storage=storage, dtype=dtype, strided_q=True)
    engine = kernels.plain_engine(kernels.Plain(dtype, 64), 4, 2, None, 0)
    check(engine, problem, problem.answer(), num_workers=3)


@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 32, 48, 64, 65, 128, 256])
@pytest.mark.parametrize("storage", ["nhd", "interleaved"])
def test_block_size(block_size: int, storage: str) -> None:
    problem = make_problem(QO_LENS, KV_LENS, block_size=block_size, storage=storage)
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    check(engine, problem, problem.answer(), num_workers=3)


@pytest.mark.parametrize("table", ["page_table", "csr", "scattered", "token_table"])
def test_table(table: str) -> None:
    problem = make_problem(QO_LENS, KV_LENS, block_size=1, table=table)
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    check(engine, problem, problem.answer(), num_workers=3)


def test_one_kv_head_shared_by_stride_zero() -> None:
    """A multi-query cache expanded to several heads: stride 0 is a multiple of 16 bytes like any other."""
    problem = make_problem(QO_LENS, KV_LENS, num_qo_heads=4, num_kv_heads=1)
    answer = problem.answer()
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    k, v = (cache.expand(-1, -1, 2, -1) for cache in (problem.k_cache, problem.v_cache))
    out = engine.run(plan, problem.q, k, v)
    expected = torch.from_numpy(answer.out).float()
    torch.testing.assert_close(out[: problem.total_q], expected, rtol=1e-4, atol=1e-5)


def test_strides_of_size_one_dimensions_are_ignored() -> None:
    problem = make_problem(QO_LENS, KV_LENS, num_qo_heads=2, num_kv_heads=1, block_size=1)
    k, v = problem.k_cache, problem.v_cache
    odd_k = k.as_strided(k.shape, (k.stride(0), 7, 13, 1))
    odd_v = v.as_strided(v.shape, (v.stride(0), 1, 3, 1))
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 2, 1, None, 0)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    assert torch.equal(
        engine.run(plan, problem.q, odd_k, odd_v)[: problem.total_q],
        engine.run(plan, problem.q, k, v)[: problem.total_q],
    )


def test_offsets_beyond_two_to_the_31() -> None:
    """A few pages of a buffer whose block stride is 2^29 elements: offsets need 64 bits."""
    stride = 2**29 + 64
    k_cache, v_cache = (torch.empty(6 * stride, dtype=torch.float16) for _ in range(2))
    shape, strides = (6, 16, 2, 64), (stride, 2 * 64, 64, 1)
    k_view, v_view = (cache.as_strided(shape, strides) for cache in (k_cache, v_cache))
    problem = make_problem([1], [60], dtype=torch.float16, seed=3)
    moved = {block: 5 - i for i, block in enumerate(problem.block_ids[0])}
    for block, to in moved.items():
        k_view[to] = problem.k_cache[block]
        v_view[to] = problem.v_cache[block]
    layout = type(problem.layout).from_csr(
        torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([moved[b] for b in problem.block_ids[0]], dtype=torch.int32),
        torch.tensor([60], dtype=torch.int32),
        16,
    )
    engine = kernels.plain_engine(kernels.Plain(torch.float16, 64), 4, 2, None, 0)
    near = engine.run(engine.plan(problem.qo_indptr, problem.layout), problem.q, problem.k_cache, problem.v_cache)
    far = engine.run(engine.plan(problem.qo_indptr, layout), problem.q, k_view, v_view)
    assert torch.equal(near[:1], far[:1])


def test_requests_may_share_blocks() -> None:
    """A shared prefix: three requests read the same pages, each with a suffix of its own."""
    problem = make_problem([1, 1, 4, 1], [160, 20, 33, 16], seed=9)
    prefix, suffixes = problem.block_ids[0], problem.block_ids[1:]
    ids = [prefix + suffix for suffix in suffixes]
    lengths = [160 + length for length in problem.kv_lens[1:]]
    layout = BlockSparseLayout.from_csr(
        indptr([len(row) for row in ids]),
        torch.tensor([block for row in ids for block in row], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        16,
    )
    shared = dataclasses.replace(
        problem, qo_lens=[1, 4, 1], kv_lens=lengths, qo_indptr=indptr([1, 4, 1]), layout=layout, block_ids=ids
    )
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    check(engine, shared, shared.answer(), num_workers=3)
