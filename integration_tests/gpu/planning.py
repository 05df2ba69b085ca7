"""Random planning problems, for every planner."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from torch import Tensor

from attnloom import BlockSparseLayout
from attnloom.core.abi import PLAN_HEADER_WORDS
from attnloom.core.block_mask import BlockMask
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.plan_input import PlanInput
from attnloom.core.planner import plan_on_host
from attnloom.core.tiles import Costs


def gpu() -> torch.device:
    """The current one."""
    return torch.device("cuda", torch.cuda.current_device())


def arrays(plan: Plan) -> Tensor:
    """Everything the planner wrote, in one row."""
    read = plan.host()
    parts = [
        read.qo_indptr,
        read.tile_request,
        read.tile_row,
        read.tile_rows,
        read.tile_kv_tiles,
        read.worker_tile,
        read.worker_head,
        read.worker_kv,
        read.split_begin,
        read.split_end,
    ]
    return torch.cat([read.buffer[:PLAN_HEADER_WORDS], *parts])


def layout_of(num_requests: int, positions: bool, where: torch.device | str) -> BlockSparseLayout:
    empty = torch.zeros(1, dtype=torch.int32, device=where)
    return BlockSparseLayout(
        1,
        torch.zeros(num_requests, dtype=torch.int64, device=where),
        torch.zeros(num_requests, dtype=torch.int32, device=where),
        empty,
        empty if positions else None,
    )


class Batch:
    """One random planning problem: decodes, prefills and requests without queries in any order.

    Args:
        device: of the plan: planners on the host take it too.
    """

    def __init__(self, rng: random.Random, device: torch.device) -> None:
        requests = rng.choice([0, 1, 2, rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 1500)])
        longest_q = rng.choice([1, 1, 4, 40, 700]) if requests < 200 else rng.choice([1, 1, 3])
        longest_kv = rng.choice([3, 100, 4000, 200_000])
        decodes = rng.choice([0, 0.5, 0.9])
        self.qo_lens = [rng.randint(0, 1 if rng.random() < decodes else longest_q) for _ in range(requests)]
        self.kv_lens = [rng.choice([0, 1, rng.randint(0, longest_kv)]) for _ in range(requests)]
        kv_heads = rng.choice([1, 2, 3, 8])
        group = rng.choice([1, 2, 4, 7, 16, 128])
        tiles = rng.choice([(16, 128, 64), (16, 64, 64), (8, 32, 16), (16, 16, 64)])
        left = rng.choice([None, None, 0, rng.randint(1, 5000)])
        right = rng.choice([0, 0, None, rng.randint(0, 300)])
        chunk = rng.choice([0, 0, 0, rng.randint(1, 40)])
        self.key = PlanKey(group * kv_heads, kv_heads, *tiles, left, right, device, "", chunk)
        self.lockstep = rng.choice([1, kv_heads])
        self.num_workers = self.lockstep * rng.choice([1, 2, 33, 132, 264])
        self.costs = Costs(
            rng.randint(1, 500), rng.choice([0, rng.randint(1, 20)]), rng.randint(0, 300), rng.randint(1, 20)
        )
        self.positions = rng.random() < 0.1
        self.slack = rng.choice([0, 0, rng.randint(0, 500)])

    @property
    def total_q(self) -> int:
        """The bound of its queries that a planner on a device is told."""
        return sum(self.qo_lens) + self.slack

    def given(self, where: torch.device | str, block_mask: BlockMask | None = None) -> PlanInput:
        """What a planner takes, with lengths on a device."""
        return PlanInput(
            torch.tensor([0, *accumulate(self.qo_lens)], dtype=torch.int32, device=where),
            torch.tensor(self.kv_lens, dtype=torch.int32, device=where),
            self.key,
            num_workers=self.num_workers,
            lockstep=self.lockstep,
            costs=self.costs,
            layout=layout_of(len(self.qo_lens), self.positions, where),
            block_mask=block_mask,
        )

    def host(self, block_mask: BlockMask | None = None) -> Plan:
        """The host's plan, with as much room as one made on a device."""
        given = self.given("cpu", block_mask)
        return plan_on_host(given, tile_capacity=given.tiles_for(self.total_q))
