"""One step on a GPU: a paged cache, lengths that may change under a captured graph, and what float64 makes of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from attnloom import Attention, BlockSparseLayout, Variant, variants
from attnloom.core.plan import Plan

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE = 8, 2, 128, 16


@functools.cache
def engine_of(variant: Variant | None = None, num_kv_heads: int = NUM_KV_HEADS) -> Attention:
    """The engine of the problems here; bfloat16, causal if nothing else is said."""
    return Attention(
        NUM_QO_HEADS,
        num_kv_heads,
        HEAD_DIM,
        dtype=torch.bfloat16,
        variant=variants.Causal() if variant is None else variant,
        device="cuda",
    )


class Problem:
    """Requests over one cache. Rows of q and out past the queries belong to nobody.

    Args:
        qo_lens, kv_lens: of each request.
        longest: tokens for which the tables have room; None: those of kv_lens.
        rows: of q; None: as many as queries.
    """

    def __init__(
        self, qo_lens: Sequence[int], kv_lens: Sequence[int], *, longest: int | None = None, rows: int | None = None
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        longest = max([1, *kv_lens]) if longest is None else longest
        pages = -(-longest // PAGE)
        order = torch.randperm(len(kv_lens) * pages, generator=generator, device="cuda").to(torch.int32)
        self.table = order.view(len(kv_lens), pages)
        shape = (2, len(kv_lens) * pages, PAGE, NUM_KV_HEADS, HEAD_DIM)
        self.k, self.v = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        rows = sum(qo_lens) if rows is None else rows
        self.q = torch.randn(rows, NUM_QO_HEADS, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.out = torch.full_like(self.q, 7.0)
        self.indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(len(kv_lens), dtype=torch.int32, device="cuda")
        self.layout = BlockSparseLayout.from_page_table(self.table, self.lengths, PAGE)
        self.set(qo_lens, kv_lens)

    def set(self, qo_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        """Other lengths, in the same tensors."""
        self.qo_lens, self.kv_lens = list(qo_lens), list(kv_lens)
        self.indptr.copy_(torch.tensor([0, *accumulate(qo_lens)], dtype=torch.int32))
        self.lengths.copy_(torch.tensor(kv_lens, dtype=torch.int32))

    @property
    def total_q(self) -> int:
        return sum(self.qo_lens)

    def host_plan(self, engine: Attention, into: Plan | None = None) -> Plan:
        """From lengths on the host."""
        return engine.plan(
            torch.tensor([0, *accumulate(self.qo_lens)], dtype=torch.int32),
            self.layout,
            kv_lens=torch.tensor(self.kv_lens, dtype=torch.int32),
            into=into,
        )

    def device_plan(self, engine: Attention, total_q: int | None = None) -> Plan:
        """From lengths on the device."""
        return engine.plan(self.indptr, self.layout, total_q=self.total_q if total_q is None else total_q)

    def run(self, engine: Attention, plan: Plan, out: Tensor | None = None) -> Tensor:
        return engine.run(plan, self.q, self.k, self.v, out=self.out if out is None else out)

    def expected(self, *, causal: bool = True) -> Tensor:
        """float64 ``[total_q, heads, dim]``; 0 where a query sees no key."""
        rows = []
        for request, (queries, length) in enumerate(zip(self.qo_lens, self.kv_lens, strict=True)):
            pages = self.table[request].long()
            k, v = (
                cache[pages]
                .reshape(-1, NUM_KV_HEADS, HEAD_DIM)[:length]
                .double()
                .repeat_interleave(NUM_QO_HEADS // NUM_KV_HEADS, 1)
                for cache in (self.k, self.v)
            )
            first = sum(self.qo_lens[:request])
            q = self.q[first : first + queries].double()
            scores = torch.einsum("qhd,khd->qhk", q, k) * HEAD_DIM**-0.5
            if causal:
                position = torch.arange(queries, device="cuda")[:, None] + length - queries
                unseen = torch.arange(length, device="cuda")[None, :] > position
                scores = scores.masked_fill(unseen[:, None], -math.inf)
            rows.append(torch.einsum("qhk,khd->qhd", scores.softmax(2).nan_to_num(), v))
        return torch.cat(rows)

    def check(self, out: Tensor | None = None, *, causal: bool = True) -> None:
        """The rows of the batch are right, and no other was touched."""
        out = self.out if out is None else out
        torch.testing.assert_close(out[: self.total_q].double(), self.expected(causal=causal), atol=2e-2, rtol=2e-2)
        assert bool((out[self.total_q :] == 7).all()), "rows past the queries were touched"
