"""A drawn case as tensors: for the engine paged and poisoned all around, for the oracle dense."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from attnloom import BlockSparseLayout
from integration_tests.gpu.cases import Case
from integration_tests.gpu.kernels import Kernel
from integration_tests.gpu.oracle import Request
from integration_tests.gpu.storage import DEVICE, bits, caches, poisoned
from integration_tests.gpu.variant_cases import Params, Shape, packed_from

SPARE_ROWS = 3
_SPARE_BLOCKS = 4


@dataclass(frozen=True)
class Batch:
    """What ``plan`` and ``run`` take, and the same batch for the oracle. q has poisoned rows after the last query."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    layout: BlockSparseLayout
    requests: list[Request]
    shape: Shape
    params: Params

    def indptr(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.shape.qo_lens)], dtype=torch.int32)


def make_batch(kernel: Kernel, case: Case) -> Batch:
    """Random q, K and V; every slot that no query may see is poison."""
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    size, heads, dim = case.block_size, case.num_kv_heads, kernel.head_dim
    needed = [-(-length // size) for length in case.kv_lens]
    blocks = sum(needed) + _SPARE_BLOCKS
    free = rng.sample(range(blocks), sum(needed))
    ends = list(accumulate(needed))
    ids = [free[end - count : end] for end, count in zip(ends, needed, strict=True)]
    masks = _masks(case, kernel)
    shape = Shape(case.num_qo_heads, heads, dim, case.qo_lens, case.kv_lens, masks)

    params: Params
    if case.trees is None:
        layout = _layout(case, ids, blocks, rng).to(DEVICE)
        params = kernel.case.params(shape)
    else:
        slots = [torch.tensor(row, dtype=torch.int32) for row in ids]
        layout, params = BlockSparseLayout.from_tree(slots, case.trees, device=DEVICE)

    k_cache, v_cache = caches(case.storage, blocks, size, heads, dim, kernel.kv_dtype)
    q = poisoned(case.total_q + SPARE_ROWS, case.num_qo_heads + 2, dim + 16, dtype=kernel.dtype)[:, 1:-1, 8 : 8 + dim]
    if rng.random() < 0.5:
        q = q.contiguous()
    q[: case.total_q] = torch.randn(case.total_q, case.num_qo_heads, dim, device=DEVICE).to(kernel.dtype)
    requests, row = [], 0
    kept: list[Request] = []
    written: list[Tensor] = []
    for r, (queries, length) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
        k, v = torch.randn(2, length, heads, dim, device=DEVICE).to(kernel.kv_dtype)
        request = Request(q[row : row + queries], k, v, _positions(layout, r, length))
        row += queries
        first = _first_read(kernel, case, r, trimmed=layout.positions is None)
        slots = torch.arange(first, length)
        block = torch.tensor([*ids[r], 0])[slots // size]
        written.append(torch.stack([block, slots % size]))
        requests.append(request)
        kept.append(replace(request, k=k[first:], v=v[first:]))
    block, offset = torch.cat(written, 1).to(DEVICE)
    _bytes(k_cache)[block, offset] = _bytes(torch.cat([request.k for request in kept]))
    _bytes(v_cache)[block, offset] = _bytes(torch.cat([request.v for request in kept]))
    return Batch(q, k_cache, v_cache, layout, requests, shape, params)


def _bytes(tensor: Tensor) -> Tensor:
    """8-bit floats as integers: torch has no scatter of them."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _first_read(kernel: Kernel, case: Case, r: int, *, trimmed: bool) -> int:
    """The first slot of a request that one of its queries may see; what lies before is never read."""
    queries, length = case.qo_lens[r], case.kv_lens[r]
    if queries == 0:
        return length
    if not trimmed:
        return 0
    first = length - queries
    in_band = 0 if case.left is None else first - case.left
    return min(length, max(0, in_band, kernel.case.first_read(first)))


def _positions(layout: BlockSparseLayout, r: int, length: int) -> Tensor:
    slots = torch.arange(length, device=DEVICE)
    if layout.positions is None:
        return slots
    size = layout.block_size
    return layout.positions[int(layout.starts[r]) + slots // size * layout.index_stride].long() + slots % size


def _masks(case: Case, kernel: Kernel) -> list[Tensor] | None:
    if kernel.name != "packed mask":
        return None
    shapes = list(zip(case.qo_lens, case.kv_lens, strict=True))
    if case.trees is None:
        masks = [torch.rand(queries, length, device=DEVICE) < 0.4 for queries, length in shapes]
        for mask in masks:
            mask[:, : packed_from(mask)] = True
        return masks
    masks = []
    for parents, (queries, length) in zip(case.trees, shapes, strict=True):
        mask = torch.zeros(queries, length, dtype=torch.bool)
        mask[:, : length - queries] = True
        for draft in range(queries):
            ancestor = draft
            while ancestor >= 0:
                mask[draft, length - queries + ancestor] = True
                ancestor = parents[ancestor]
        masks.append(mask.to(DEVICE))
    return masks


def _layout(case: Case, ids: list[list[int]], blocks: int, rng: random.Random) -> BlockSparseLayout:
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32)
    stale = [rng.randrange(blocks) for _ in range(64)]
    if case.table == "page_table":
        widest = max(len(row) for row in ids) + rng.randrange(4)
        table = torch.tensor(stale * (1 + len(ids) * (widest + 5) // 64), dtype=torch.int32)
        table = table[: len(ids) * (widest + 5)].view(len(ids), widest + 5)
        for r, row in enumerate(ids):
            table[r, : len(row)] = torch.tensor(row, dtype=torch.int32)
        layout = BlockSparseLayout.from_page_table(table[:, : widest + 2], lengths, case.block_size)
    elif case.table == "csr":
        indptr = torch.tensor([0, *accumulate(len(row) for row in ids)], dtype=torch.int32)
        flat = torch.tensor([block for row in ids for block in row], dtype=torch.int32)
        layout = BlockSparseLayout.from_csr(indptr, flat, lengths, case.block_size)
    elif case.table == "token_table":
        widest = max(len(row) for row in ids) + 3
        rows = rng.sample(range(len(ids) + 4), len(ids))
        pool = torch.zeros(len(ids) + 4, widest, dtype=torch.int32)
        for row, slots in zip(rows, ids, strict=True):
            pool[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        layout = BlockSparseLayout.from_token_table(pool, torch.tensor(rows), lengths)
    else:
        stride = rng.choice((1, 1, 2, case.block_size, 37))
        flat_ids, starts = [stale[0]], [0] * len(ids)
        for r in rng.sample(range(len(ids)), len(ids)):
            starts[r] = len(flat_ids)
            for block in ids[r]:
                flat_ids += [block, *rng.choices(stale, k=stride - 1)]
            flat_ids += stale[: rng.randrange(3)]
        indices = torch.tensor(flat_ids, dtype=torch.int32)
        layout = BlockSparseLayout(case.block_size, torch.tensor(starts), lengths, indices, index_stride=stride)
    return _apart(layout, ids, rng) if case.positions else layout


def _apart(layout: BlockSparseLayout, ids: list[list[int]], rng: random.Random) -> BlockSparseLayout:
    """Blocks with gaps between them: pages that a selection left out."""
    positions = torch.full_like(layout.indices, -7)
    for r, row in enumerate(ids):
        steps = [rng.choice((1, 1, 1, 2, 5)) for _ in row]
        at = torch.tensor(list(accumulate(steps)), dtype=torch.int32) - 1
        start = int(layout.starts[r])
        entries = start + torch.arange(len(row)) * layout.index_stride
        positions[entries] = at * layout.block_size
    return replace(layout, positions=positions)


class Output:
    """A poisoned buffer, and the view of it that a launch writes: gaps between heads and rows, spare rows after."""

    def __init__(self, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.buffer = poisoned(rows, heads + 1, dim + 4, dtype=dtype)
        self.view = self.buffer[:, 1:, 4:]

    def assert_untouched(self, total_q: int) -> None:
        """Nothing but rows [0, total_q) of the view was written."""
        before, after = poisoned(*self.buffer.shape, dtype=self.buffer.dtype), self.buffer.clone()
        after[:total_q, 1:, 4:] = before[:total_q, 1:, 4:]
        assert torch.equal(bits(after), bits(before)), "memory outside the rows of the batch was written"
