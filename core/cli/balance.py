"""The numbers of a plan: what each worker is given, what is read, and how long the busiest one takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnloom.core.plan import Piece, Plan
from attnloom.core.planner import plan_algorithm1


@dataclass(frozen=True)
class WorkerPiece:
    """A stretch of one item on one worker.

    Attributes:
        piece: what is run.
        request: whose it is.
        cost: in the units of the plan's cost model, an item's own cost included.
        whole: the piece is a whole item; otherwise its result is a partial state that is merged.
    """

    piece: Piece
    request: int
    cost: int
    whole: bool


@dataclass(frozen=True)
class Balance:
    """Numbers of a plan. Costs are in the units of its cost model; bytes are those of one layer.

    Attributes:
        workers: the pieces of each worker, in order.
        items: query tiles times kv heads.
        splits: items that more than one worker computes.
        partials: partial states that are written and merged.
        kv_tiles: KV tiles executed.
        algorithm1: makespan of Algorithm 1 on the same query tiles.
        algorithm1_chunks: KV chunks that it makes.
        kv_bytes: keys and values that are stored for the step, once.
        read_bytes: keys and values that are read, in whole tiles; a prefix that requests share counts for each.
        row_bytes: queries read and rows written.
        partial_bytes: partial states, written once and read once.
    """

    workers: tuple[tuple[WorkerPiece, ...], ...]
    items: int
    splits: int
    partials: int
    kv_tiles: int
    algorithm1: int
    algorithm1_chunks: int
    kv_bytes: int
    read_bytes: int
    row_bytes: int
    partial_bytes: int

    @property
    def costs(self) -> list[int]:
        """Of each worker."""
        return [sum(each.cost for each in pieces) for pieces in self.workers]

    @property
    def makespan(self) -> int:
        """Cost of the busiest worker."""
        return max(self.costs)

    @property
    def mean(self) -> float:
        """Cost of a worker, on average."""
        return sum(self.costs) / len(self.workers)

    @property
    def imbalance(self) -> float:
        """The busiest worker, as a multiple of the mean; 1 where there is nothing to do."""
        return self.makespan / self.mean if self.mean else 1.0


def balance(plan: Plan, kv_lens: Sequence[int], *, head_dim: int, element_bytes: int) -> Balance:
    """The numbers of a plan. Enumerates its items: for people, not for a step.

    Args:
        plan: of the step.
        kv_lens: KV tokens of each request.
        head_dim: of keys and values.
        element_bytes: of an element of q, the caches and the output.
    """
    key = plan.key
    requests, rows, kv_tiles = plan.tile_request.tolist(), plan.tile_rows.tolist(), plan.tile_kv_tiles.tolist()
    workers: list[list[WorkerPiece]] = [[] for _ in range(plan.num_workers)]
    partial_rows = 0
    for piece in plan.pieces():
        cost = plan.costs.of(rows[piece.tile], piece.kv_end - piece.kv_begin)
        whole = piece.kv_begin == 0 and piece.kv_end == kv_tiles[piece.tile]
        workers[piece.worker].append(WorkerPiece(piece, requests[piece.tile], cost, whole))
        partial_rows += 0 if whole else rows[piece.tile]
    executed = int(plan.worker_tiles().sum())
    yardstick = plan_algorithm1(plan)
    return Balance(
        workers=tuple(map(tuple, workers)),
        items=plan.num_tiles * key.num_kv_heads,
        splits=plan.num_splits,
        partials=sum(not each.whole for pieces in workers for each in pieces),
        kv_tiles=executed,
        algorithm1=yardstick.makespan,
        algorithm1_chunks=yardstick.num_chunks,
        kv_bytes=sum(kv_lens) * key.num_kv_heads * 2 * head_dim * element_bytes,
        read_bytes=executed * key.tile_kv * 2 * head_dim * element_bytes,
        row_bytes=plan.total_q * key.num_qo_heads * 2 * head_dim * element_bytes,
        partial_bytes=2 * partial_rows * (head_dim + 1) * 4,
    )
