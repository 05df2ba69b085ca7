"""The plan of one step: what each worker runs, as a readable dataclass over one flat int32 buffer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnloom.core.abi import PLAN_HEADER_WORDS, PlanHeader
from attnloom.core.block_mask import BlockMask
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.tiles import Costs


class PlanKey(NamedTuple):
    """What a plan depends on besides lengths: one plan serves every layer with the same key."""

    num_qo_heads: int
    num_kv_heads: int
    tile_q_short: int
    tile_q: int
    tile_kv: int
    left: int | None
    right: int | None
    device: torch.device
    ranges: str = ""
    """Name of the kernel whose variant declares the visible range; empty: the band alone."""
    chunk: int = 0
    """KV tiles of a chunk, in the batch_invariant mode: items are cut at whole chunks, which count from slot 0, and
    tiles that a block mask hides are counted. 0: items are cut at any tile."""


class Piece(NamedTuple):
    """A contiguous stretch of one item (query tile, kv head), run by one worker.

    KV tiles count from the first visible one of the item.
    """

    worker: int
    tile: int
    head: int
    kv_begin: int
    kv_end: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What one step will run; made from lengths before the kernel.

    Items (query tile, kv head) lie in one line: by tile, then kv head, then KV tile inside the item; worker w runs the
    stretch from its start to the start of worker w + 1. A KV tile is counted from the first visible one as the kernel
    finds it from the true lengths, and the last piece of an item runs to the item's end: a plan stays right when true
    lengths differ from the planned ones, and only the balance suffers.

    Query tiles lie in the line in the order of the requests. Where ``key.tile_q > key.tile_q_short``, the tiles of
    requests with more than ``tile_q_short`` folded rows come first, dealt to the S stretches in turn: tile r of them,
    in the order of the requests, is number ``r // S`` of those dealt to stretch ``r % S``, which lie side by side. All
    other tiles follow.

    Attributes:
        key: what it depends on besides lengths.
        num_requests: rows of the layout.
        num_tiles: query tiles; -1 where the device planned and nobody read it back (see :meth:`host`).
        num_workers: workers; on a CPU they are shared by torch's threads.
        lockstep: neighbouring workers that run the same stretch, each on another kv head of a group of as many; arrays
            "per stretch" have ``num_workers // lockstep`` entries.
        total_q: query tokens.
        costs: the cost model it was balanced with.
        buffer: int32, a header and the arrays below (csrc/planner/plan.h), where the kernel runs.
        layout: where the KV lies; None for a plan made for its numbers only.
        block_mask: KV tiles that are skipped or need no mask, or None.
    """

    key: PlanKey
    num_requests: int
    num_tiles: int
    num_workers: int
    lockstep: int
    total_q: int
    tile_capacity: int
    costs: Costs
    buffer: Tensor
    layout: BlockSparseLayout | None = None
    block_mask: BlockMask | None = None
    # Block counts of caches that the block ids were checked against.
    checked_blocks: set[int] = field(default_factory=set, repr=False)
    # What a launch on a GPU takes from this plan (core/direct.py), once it was asked for.
    kernel_words: list[memoryview] = field(default_factory=list, init=False, repr=False)

    def host(self) -> Plan:
        """The same plan with its arrays on the host, for people and tests: it waits for the device."""
        if self.buffer.device.type == "cpu":
            return self
        buffer = self.buffer.cpu()
        header = PlanHeader.from_address(buffer.data_ptr())
        here = replace(self, buffer=buffer, num_tiles=header.num_tiles)
        return replace(here, total_q=int(here.qo_indptr[-1]))

    def _array(self, index: int) -> Tensor:
        if self.buffer.device.type != "cpu":
            return self.host()._array(index)
        tiles, stretches = self.tile_capacity, self.num_workers // self.lockstep
        rooms = [*[stretches + 1] * 3, stretches, stretches, self.num_requests + 1, tiles, tiles, tiles, tiles]
        used = [*[stretches + 1] * 3, stretches, stretches, self.num_requests + 1, *[self.num_tiles] * 4]
        start = PLAN_HEADER_WORDS + sum(rooms[:index])
        return self.buffer[start : start + used[index]]

    @property
    def qo_indptr(self) -> Tensor:
        """int32 ``[num_requests + 1]``: queries of request r are rows ``qo_indptr[r] : qo_indptr[r + 1]`` of q."""
        return self._array(5)

    @property
    def tile_request(self) -> Tensor:
        """int32 ``[num_tiles]``: the request of a query tile, in the order of the line; the next three likewise."""
        return self._array(6)

    @property
    def tile_row(self) -> Tensor:
        """int32 ``[num_tiles]``: its first folded row: row f is query ``f // group``, head ``f % group``."""
        return self._array(7)

    @property
    def tile_rows(self) -> Tensor:
        """int32 ``[num_tiles]``: its folded rows."""
        return self._array(8)

    @property
    def tile_kv_tiles(self) -> Tensor:
        """int32 ``[num_tiles]``: KV tiles that are visible to it, per kv head."""
        return self._array(9)

    @property
    def worker_tile(self) -> Tensor:
        """int32 ``[stretches + 1]``: query tile at which a stretch begins."""
        return self._array(0)

    @property
    def worker_head(self) -> Tensor:
        """int32 ``[stretches + 1]``: kv head (with lockstep: group of kv heads) at which it begins."""
        return self._array(1)

    @property
    def worker_kv(self) -> Tensor:
        """int32 ``[stretches + 1]``: KV tile, inside the item, at which it begins."""
        return self._array(2)

    @property
    def split_begin(self) -> Tensor:
        """int32 ``[stretches]``: the stretch that opened the item inside which a stretch begins, or -1."""
        return self._array(3)

    @property
    def split_end(self) -> Tensor:
        """int32 ``[stretches]``: the last stretch of the item that a stretch opens and leaves open, or -1."""
        return self._array(4)

    @property
    def num_splits(self) -> int:
        """Items that more than one worker computes."""
        return int((self.split_end >= 0).sum()) * self.lockstep

    def pieces(self) -> list[Piece]:
        """Every piece of every worker, in order. Enumerates items: for people and tests, not for a step."""
        if self.buffer.device.type != "cpu":
            return self.host().pieces()
        kv_tiles = self.tile_kv_tiles.tolist()
        starts = list(zip(self.worker_tile.tolist(), self.worker_head.tolist(), self.worker_kv.tolist(), strict=True))
        heads = self.key.num_kv_heads // self.lockstep
        found = []
        for worker in range(self.num_workers):
            stretch, lane = divmod(worker, self.lockstep)
            (tile, head, kv), stop = starts[stretch], starts[stretch + 1]
            while (tile, head, kv) < stop:
                last = (tile, head) == stop[:2]
                found.append(Piece(worker, tile, head * self.lockstep + lane, kv, stop[2] if last else kv_tiles[tile]))
                if last:
                    break
                tile, head, kv = (tile, head + 1, 0) if head + 1 < heads else (tile + 1, 0, 0)
        return found

    def _before(self, per_tile: Tensor, inside: Tensor) -> Tensor:
        """Sums of ``per_tile`` (per kv head) over the line of items, from each worker's start to its stop."""
        heads = self.key.num_kv_heads // self.lockstep
        prefix = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(per_tile.to(torch.int64) * heads, 0)])
        each = torch.cat([per_tile.to(torch.int64), torch.zeros(1, dtype=torch.int64)])
        tile = self.worker_tile.to(torch.int64)
        return (prefix[tile] + self.worker_head * each[tile] + inside).diff().repeat_interleave(self.lockstep)

    def worker_tiles(self) -> Tensor:
        """int64 ``[num_workers]``: KV tiles that a worker executes, summed over its items."""
        return self._before(self.tile_kv_tiles, self.worker_kv.to(torch.int64))

    def __str__(self) -> str:
        """A table: a line per worker."""
        if self.buffer.device.type != "cpu":
            return str(self.host())
        loads = self.worker_tiles()
        mean = float(loads.to(torch.float64).mean()) if self.num_workers else 0.0
        busiest = int(loads.max()) if self.num_workers else 0
        lines = [
            f"plan: {self.num_requests} requests, {self.total_q} queries, {self.key.num_qo_heads}/"
            f"{self.key.num_kv_heads} heads, {self.num_tiles} query tiles of <= {self.key.tile_q} rows, "
            f"KV tiles of {self.key.tile_kv}, band ({self.key.left}, {self.key.right})",
            f"      {self.num_workers} workers, {int(loads.sum())} KV tiles executed, busiest {busiest} "
            f"({busiest / mean if mean else 1.0:.3f} x mean), {self.num_splits} items split",
            "worker   KV tiles  from (tile, head, kv)     opens  until worker",
        ]
        tile, head, kv, end = (
            array.tolist() for array in (self.worker_tile, self.worker_head, self.worker_kv, self.split_end)
        )
        for worker, load in enumerate(loads.tolist()):
            stretch, lane = divmod(worker, self.lockstep)
            start = f"({tile[stretch]}, {head[stretch] * self.lockstep + lane}, {kv[stretch]})"
            split = f"split  {end[stretch] * self.lockstep + lane}" if end[stretch] >= 0 else ""
            lines.append(f"{worker:6d} {load:10d}  {start:24s}  {split}".rstrip())
        return "\n".join(lines)
