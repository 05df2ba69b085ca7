"""A batch for the engine together with the same batch, dense, for the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnloom.core.layout import BlockSparseLayout
from tests.core.storage import caches, poisoned
from tests.oracle import Answer, Band, DenseRequest, Hooks, attention, gather

SPARE_QUERY_ROWS = 3
EVERYTHING = Band(None, None)


@dataclass(frozen=True)
class Problem:
    """What `engine.plan` and `engine.run` take; `q` has rows past `qo_indptr[-1]`, which are poison."""

    qo_lens: list[int]
    kv_lens: list[int]
    qo_indptr: torch.Tensor
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    layout: BlockSparseLayout
    block_ids: list[list[int]]

    @property
    def total_q(self) -> int:
        return sum(self.qo_lens)

    def positions(self, r: int, length: int) -> list[int]:
        """Position of each of the first `length` keys of request r, looked up block by block."""
        size, stride = self.layout.block_size, self.layout.index_stride
        if self.layout.positions is None:
            return list(range(length))
        start = int(self.layout.starts[r])
        return [int(self.layout.positions[start + t // size * stride]) + t % size for t in range(length)]

    def dense(self, kv_lens: Sequence[int] | None = None) -> list[DenseRequest]:
        """Every request with its keys and values gathered; `kv_lens` shortens them."""
        requests, row = [], 0
        for r, (n, length) in enumerate(zip(self.qo_lens, kv_lens or self.kv_lens, strict=True)):
            k = gather(self.k_cache, self.block_ids[r], length)
            v = gather(self.v_cache, self.block_ids[r], length)
            requests.append(DenseRequest(self.q[row : row + n], k, v, self.positions(r, length)))
            row += n
        return requests

    def answer(
        self,
        band: Band = Band(),
        hooks: Hooks = Hooks(),
        *,
        kv_lens: Sequence[int] | None = None,
        sm_scale: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Answer:
        return attention(
            self.dense(kv_lens), band=band, hooks=hooks, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale
        )


def make_problem(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    index_stride: int = 1,
    storage: str = "nhd",
    table: str = "page_table",
    readable: Band = EVERYTHING,
    strided_q: bool = False,
    amplitude: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Random q, K and V in randomly permuted blocks.

    table: how the layout is made: "page_table", "csr", "token_table" (block_size 1), or "scattered" (rows of `indices`
    in any order with gaps). Block 0 belongs to nobody.
    index_stride: of a scattered layout; the entries between are block 0.
    readable: only keys that some query of the request sees under this band are written; every other slot stays poison.
    """
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    dim_v = head_dim if head_dim_v is None else head_dim_v
    needed = [-(-length // block_size) for length in kv_lens]
    num_blocks = sum(needed) + 4
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    block_ids = [[free.pop() for _ in range(count)] for count in needed]

    k_cache, v_cache = caches(storage, num_blocks, block_size, num_kv_heads, head_dim, dim_v, dtype)
    for n, length, ids in zip(qo_lens, kv_lens, block_ids, strict=True):
        first = 0 if readable.left is None else max(0, length - n - readable.left)
        last = length if readable.right is None else min(length, length + readable.right)
        k = torch.randn(max(0, last - first), num_kv_heads, head_dim, generator=gen) * amplitude
        v = torch.randn(max(0, last - first), num_kv_heads, dim_v, generator=gen)
        for begin in range(first - first % block_size, last, block_size):
            low, high = max(first, begin), min(last, begin + block_size)
            block, slots = ids[begin // block_size], slice(low - begin, high - begin)
            k_cache[block, slots] = k[low - first : high - first].to(dtype)
            v_cache[block, slots] = v[low - first : high - first].to(dtype)

    rows = sum(qo_lens) + SPARE_QUERY_ROWS
    q = poisoned(rows, num_qo_heads + 2, head_dim + 16, dtype=dtype)[:, 1:-1, 8 : 8 + head_dim]
    if not strided_q:
        q = q.contiguous()
    q[: sum(qo_lens)] = torch.randn(sum(qo_lens), num_qo_heads, head_dim, generator=gen).to(dtype)
    indptr = [0]
    for n in qo_lens:
        indptr.append(indptr[-1] + n)
    return Problem(
        qo_lens=list(qo_lens),
        kv_lens=list(kv_lens),
        qo_indptr=torch.tensor(indptr, dtype=torch.int32),
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        layout=_layout(table, block_ids, kv_lens, block_size, index_stride, num_blocks, rng),
        block_ids=block_ids,
    )


def _layout(
    table: str,
    block_ids: list[list[int]],
    kv_lens: Sequence[int],
    block_size: int,
    index_stride: int,
    num_blocks: int,
    rng: random.Random,
) -> BlockSparseLayout:
    assert index_stride == 1 or table == "scattered"
    lengths = torch.tensor(list(kv_lens), dtype=torch.int32)
    widest = max((len(ids) for ids in block_ids), default=0)

    def stale() -> int:
        return rng.randrange(num_blocks)

    if table == "page_table":
        wide = torch.tensor([[stale() for _ in range(widest + 5)] for _ in block_ids], dtype=torch.int32)
        wide = wide.reshape(len(block_ids), widest + 5)
        for r, ids in enumerate(block_ids):
            wide[r, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return BlockSparseLayout.from_page_table(wide[:, : widest + 2], lengths, block_size)
    if table == "csr":
        flat = [i for ids in block_ids for i in ids]
        indptr = [0]
        for ids in block_ids:
            indptr.append(indptr[-1] + len(ids))
        return BlockSparseLayout.from_csr(
            torch.tensor(indptr, dtype=torch.int32), torch.tensor(flat, dtype=torch.int32), lengths, block_size
        )
    if table == "token_table":
        assert block_size == 1
        pool = torch.tensor(
            [[stale() for _ in range(widest + 3)] for _ in range(len(block_ids) + 4)], dtype=torch.int32
        )
        req_rows = rng.sample(range(len(block_ids) + 4), len(block_ids))
        for row, ids in zip(req_rows, block_ids, strict=True):
            pool[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return BlockSparseLayout.from_token_table(pool, torch.tensor(req_rows, dtype=torch.int64), lengths)
    assert table == "scattered"
    order = list(range(len(block_ids)))
    rng.shuffle(order)
    flat, starts = [stale()], [0] * len(block_ids)
    for r in order:
        starts[r] = len(flat)
        for block in block_ids[r]:
            flat += [block] + [0] * (index_stride - 1)
        if block_ids[r]:  # nothing lies behind the entry of a row's last block but other rows
            flat = flat[: len(flat) - index_stride + 1]
        flat += [stale() for _ in range(rng.randrange(3))]
    return BlockSparseLayout(
        block_size=block_size,
        starts=torch.tensor(starts, dtype=torch.int64),
        lengths=lengths,
        indices=torch.tensor(flat, dtype=torch.int32),
        index_stride=index_stride,
    )
