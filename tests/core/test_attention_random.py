"""Random batches through every axis at once: layout, storage, lengths, group, head size, dtype, band, workers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core import kernels
from tests.core.problem import make_problem
from tests.core.running import check
from tests.core.storage import STORAGES
from tests.core.strategies import GROUPS, bands, examples
from tests.oracle import Band

BLOCK_SIZES = (1, 2, 3, 5, 16, 24, 32, 64, 100, 128)
WORKERS = (1, 2, 3, 7, 132)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(qo_len, kv_len) of each request, small enough for an example to take milliseconds."""
    kv = st.one_of(st.integers(0, 3), st.integers(0, 330), st.sampled_from((63, 64, 65, 127, 128, 129, 256)))
    qo = st.one_of(st.just(1), st.integers(0, 3), st.integers(0, 40))
    return draw(st.lists(st.tuples(qo, kv), min_size=1, max_size=5))


@examples(4)
@given(
    kernel=st.sampled_from(kernels.PLAIN),
    batch=batches(),
    group=st.sampled_from(GROUPS),
    num_kv_heads=st.sampled_from((1, 2, 3)),
    block_size=st.sampled_from(BLOCK_SIZES),
    storage=st.sampled_from(sorted(STORAGES)),
    table=st.sampled_from(("page_table", "csr", "scattered", "token_table")),
    band=bands(),
    num_workers=st.sampled_from(WORKERS),
    strided_q=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_engine_equals_oracle(
    kernel: kernels.Plain,
    batch: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    block_size: int,
    storage: str,
    table: str,
    band: tuple[int | None, int | None],
    num_workers: int,
    strided_q: bool,
    seed: int,
) -> None:
    if group == 128:
        num_kv_heads, batch = 1, [(min(qo, 5), kv) for qo, kv in batch]
    if table == "token_table":
        block_size = 1
    left, right = band
    problem = make_problem(
        [qo for qo, _ in batch],
        [kv for _, kv in batch],
        num_qo_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=kernel.head_dim,
        dtype=kernel.dtype,
        block_size=block_size,
        storage=storage,
        table=table,
        readable=Band(left, right),
        strided_q=strided_q,
        seed=seed,
    )
    engine = kernels.plain_engine(kernel, group * num_kv_heads, num_kv_heads, left, right)
    check(engine, problem, problem.answer(Band(left, right)), num_workers=num_workers)


def test_an_empty_batch_writes_nothing() -> None:
    problem = make_problem([], [])
    engine = kernels.plain_engine(kernels.Plain(torch.float32, 64), 4, 2, None, 0)
    check(engine, make_problem([0, 0], [5, 0]), make_problem([0, 0], [5, 0]).answer())
    plan = engine.plan(problem.qo_indptr, problem.layout)
    out = engine.run(plan, problem.q, problem.k_cache, problem.v_cache)
    assert out.shape[1:] == (4, 64)
