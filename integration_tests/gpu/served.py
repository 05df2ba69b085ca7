"""Requests whose every token is a query, served in whatever parts and batches: for the batch_invariant mode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attnloom import Attention, BlockSparseLayout
from attnloom.core.plan import Plan
from integration_tests.gpu.arena_memory import assert_no_arrivals, poison_arena
from integration_tests.gpu.batch import SPARE_ROWS, Output
from integration_tests.gpu.kernels import Kernel, engine_of
from integration_tests.gpu.storage import DEVICE, bits, caches, poisoned
from integration_tests.gpu.variant_cases import Shape

Part = tuple[int, int, int]
"""Queries [begin, end) of request r, whose last sits at the last of the first ``end`` keys: (r, begin, end)."""


@dataclass(frozen=True)
class Made:
    """How a batch is planned.

    Attributes:
        num_workers: None: as many CTAs as the GPU holds.
        on_device: whether the lengths are the device's to know.
        upper: what the planner believes beyond the true lengths.
        masked: with a block mask.
    """

    num_workers: int | None = None
    on_device: bool = False
    upper: int = 0
    masked: bool = False


ALONE = Made(num_workers=1)


class Served:
    """Fresh tensors; pages lie in random order in poisoned caches.

    Args:
        kernel: whose engine serves.
        heads: query heads and kv heads.
        lengths: tokens of each request.
        page: tokens of a page.
        left: keys before itself that a query sees; None: all.
    """

    def __init__(
        self, kernel: Kernel, heads: tuple[int, int], lengths: Sequence[int], page: int, left: int | None
    ) -> None:
        self.kernel, self.page, self.lengths = kernel, page, list(lengths)
        band = kernel.case.band or (left, 0)
        self.engine: Attention = engine_of(kernel, *heads, *band)
        rng = random.Random(f"{kernel} {heads} {page} {left}")
        torch.manual_seed(rng.randrange(2**31))
        pages = [-(-length // page) for length in lengths]
        order = torch.tensor(rng.sample(range(sum(pages) + 3), sum(pages)), dtype=torch.int32)
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for r, ids in enumerate(order.split(pages)):
            self.table[r, : len(ids)] = ids
        storage = rng.choice(("nhd", "hnd", "view"))
        self.k, self.v = caches(storage, sum(pages) + 3, page, heads[1], kernel.head_dim, kernel.kv_dtype)
        for r, length in enumerate(lengths):
            slots = torch.arange(length)
            block, offset = self.table[r][slots // page].long().to(DEVICE), (slots % page).to(DEVICE)
            for cache in (self.k, self.v):
                rows = torch.randn(length, heads[1], kernel.head_dim, device=DEVICE).to(kernel.kv_dtype)
                if rows.itemsize == 1:  # torch has no scatter of 8-bit floats
                    cache.view(torch.uint8)[block, offset] = rows.view(torch.uint8)
                else:
                    cache[block, offset] = rows
        self.table = self.table.to(DEVICE)
        # Rows of very different size: some pass the reference of the softmax where others do not.
        size = (1.0 + 1.5 * torch.randn(sum(lengths), heads[0], 1, device=DEVICE)).exp2()
        self.q = (size * torch.randn(sum(lengths), heads[0], kernel.head_dim, device=DEVICE)).to(kernel.dtype)
        self.first = [0, *accumulate(lengths)]
        shape = Shape(*heads, kernel.head_dim, self.lengths, self.lengths)
        self.params = kernel.case.params(shape) or None
        self.mask = None
        if kernel.case.by_position:
            self.mask = self.engine.block_mask(max(lengths) + 400, params=self.params)

    def plan(self, parts: Sequence[Part], made: Made) -> Plan:
        """The plan of a batch of parts, in this order."""
        lengths = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
        rows = self.table[[r for r, _, _ in parts]].contiguous()
        layout = BlockSparseLayout.from_page_table(rows, lengths.to(DEVICE), self.page)
        indptr = torch.tensor([0, *accumulate(end - begin for _, begin, end in parts)], dtype=torch.int32)
        common = {
            "num_workers": made.num_workers,
            "params": self.params,
            "block_mask": self.mask if made.masked else None,
        }
        planned = lengths + made.upper
        if made.on_device:
            return self.engine.plan(
                indptr.to(DEVICE), layout, kv_lens=planned.to(DEVICE), total_q=int(indptr[-1]), **common
            )
        return self.engine.plan(indptr, layout, kv_lens=planned, **common)

    def queries(self, parts: Sequence[Part]) -> Tensor:
        """Those of the parts, and poisoned rows behind them."""
        rows = [self.q[self.first[r] + begin : self.first[r] + end] for r, begin, end in parts]
        return torch.cat([*rows, poisoned(SPARE_ROWS, *self.q.shape[1:], dtype=self.q.dtype)])

    def run(self, parts: Sequence[Part], made: Made) -> list[Tensor]:
        """Of each part what a launch gives, as bytes ``[queries, ...]``: out, the state, and both LSEs."""
        plan, q, counts = self.plan(parts, made), self.queries(parts), [end - begin for _, begin, end in parts]
        total = sum(counts)
        softmax = self.engine.variant.use_softmax
        found = []
        for state in (False, True):
            dtype = torch.float32 if state else self.engine.dtype
            output = Output(total + SPARE_ROWS, self.engine.num_qo_heads, self.engine.head_dim, dtype)
            poison_arena()
            result = self.engine.run(
                plan,
                q,
                self.k,
                self.v,
                params=self.params,
                out=output.view,
                return_lse=softmax and not state,
                return_state=state,
            )
            output.assert_untouched(total)
            assert_no_arrivals()
            assert bool(output.view[:total].isfinite().all()), "rows were not written, or from what nobody may read"
            found.append(bits(output.view[:total]).flatten(1))
            if isinstance(result, tuple) and result[1] is not None:
                found.append(bits(result[1][:total]).flatten(1))
        return list(torch.cat(found, 1).split(counts))

    def alone(self) -> list[Tensor]:
        """Each request by itself on one worker, all its queries at once."""
        return [self.run([(r, 0, length)], ALONE)[0] for r, length in enumerate(self.lengths)]

    def check(self, alone: Sequence[Tensor], parts: Sequence[Part], made: Made) -> None:
        """A batch of parts gives the bits of the requests alone."""
        for (r, begin, end), rows in zip(parts, self.run(parts, made), strict=True):
            same = rows == alone[r][begin:end]
            assert bool(same.all()), (
                f"{self.kernel}, {made}: queries {begin} to {end} of request {r}: "
                f"{(~same.all(1)).nonzero()[:8, 0].tolist()} of them have other bits"
            )

    def cuts(self, rng: random.Random, most: int) -> list[Part]:
        """All queries, each request's in up to ``most`` parts, in any order."""
        parts: list[Part] = []
        for r, length in enumerate(self.lengths):
            ends = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randrange(most)))})
            parts += [(r, begin, end) for begin, end in pairwise(ends)]
        rng.shuffle(parts)
        return parts

    def decodes(self, rng: random.Random, each: int) -> list[Part]:
        """Some single queries of each request, its last among them."""
        parts = [
            (r, i, i + 1) for r, n in enumerate(self.lengths) for i in {*rng.sample(range(n), min(n, each)), n - 1}
        ]
        rng.shuffle(parts)
        return parts
