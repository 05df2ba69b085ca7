"""The device planner gives the host's plan, word for word."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from attnloom import BlockSparseLayout
from attnloom.core.abi import PLAN_HEADER_WORDS
from attnloom.core.block_mask import BlockMask
from attnloom.core.device_planner import plan_on_device
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.plan_input import PlanInput
from attnloom.core.planner import plan_scan
from attnloom.core.tiles import Costs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BATCHES = 10_000


def device() -> torch.device:
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
    """One random planning problem."""

    def __init__(self, rng: random.Random) -> None:
        requests = rng.choice([0, 1, 2, rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 1500)])
        longest_q = rng.choice([1, 1, 4, 40, 700]) if requests < 200 else rng.choice([1, 1, 3])
        longest_kv = rng.choice([3, 100, 4000, 200_000])
        self.qo_lens = [rng.randint(0, longest_q) for _ in range(requests)]
        self.kv_lens = [rng.choice([0, 1, rng.randint(0, longest_kv)]) for _ in range(requests)]
        kv_heads = rng.choice([1, 2, 3, 8])
        group = rng.choice([1, 2, 4, 7, 16, 128])
        tiles = rng.choice([(16, 128, 64), (16, 64, 64), (8, 32, 16)])
        left = rng.choice([None, None, 0, rng.randint(1, 5000)])
        right = rng.choice([0, 0, None, rng.randint(0, 300)])
        chunk = rng.choice([0, 0, 0, rng.randint(1, 40)])
        self.key = PlanKey(group * kv_heads, kv_heads, *tiles, left, right, device(), "", chunk)
        self.lockstep = rng.choice([1, kv_heads])
        self.num_workers = self.lockstep * rng.choice([1, 2, 33, 132, 264])
        self.costs = Costs(
            rng.randint(1, 500), rng.choice([0, rng.randint(1, 20)]), rng.randint(0, 300), rng.randint(1, 20)
        )
        self.positions = rng.random() < 0.1
        self.slack = rng.choice([0, 0, rng.randint(0, 500)])

    def host(self, block_mask: BlockMask | None = None) -> Plan:
        return plan_scan(
            torch.tensor([0, *accumulate(self.qo_lens)], dtype=torch.int32),
            torch.tensor(self.kv_lens, dtype=torch.int32),
            self.key,
            num_workers=self.num_workers,
            lockstep=self.lockstep,
            costs=self.costs,
            layout=layout_of(len(self.qo_lens), self.positions, "cpu"),
            block_mask=block_mask,
            tile_capacity=self.capacity(),
        )

    def capacity(self) -> int:
        queries = sum(self.qo_lens) + self.slack
        return len(self.qo_lens) + queries * self.key.num_qo_heads // self.key.num_kv_heads // self.key.tile_q

    def on_device(self, block_mask: BlockMask | None = None, into: Plan | None = None) -> Plan:
        given = PlanInput(
            torch.tensor([0, *accumulate(self.qo_lens)], dtype=torch.int32, device=device()),
            torch.tensor(self.kv_lens, dtype=torch.int32, device=device()),
            self.key,
            num_workers=self.num_workers,
            lockstep=self.lockstep,
            costs=self.costs,
            layout=layout_of(len(self.qo_lens), self.positions, device()),
            block_mask=block_mask,
        )
        return plan_on_device(given, total_q=sum(self.qo_lens) + self.slack, into=into)


def test_ten_thousand_batches() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for index in range(BATCHES):
        batch = Batch(rng)
        expected, got = arrays(batch.host()), arrays(batch.on_device())
        assert torch.equal(expected, got), f"seed {seed}, batch {index}: {vars(batch)}"


def test_block_masks() -> None:
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    for index in range(200):
        batch = Batch(rng)
        batch.positions = False
        batch.kv_lens = [length % 3000 for length in batch.kv_lens]
        batch.qo_lens = [min(queries, length) for queries, length in zip(batch.qo_lens, batch.kv_lens, strict=True)]
        blocks = math.ceil(3000 / batch.key.tile_kv)
        requests = rng.choice([1, max(len(batch.kv_lens), 1)])
        if requests > 50:
            requests = 1
        kinds = torch.randint(0, 3, (requests, blocks, blocks), generator=generator, dtype=torch.uint8)
        host = batch.host(BlockMask(kinds, batch.key.tile_kv))
        got = batch.on_device(BlockMask(kinds.to(device()), batch.key.tile_kv))
        assert torch.equal(arrays(host), arrays(got)), f"case {index}: {vars(batch)}"


@pytest.mark.parametrize("qo_len", [1, 40])
def test_twenty_thousand_requests(qo_len: int) -> None:
    """More tiles than keep their prefix sum in shared memory."""
    batch = Batch(random.Random(1))
    batch.qo_lens = [qo_len] * 20_000
    batch.kv_lens = [(r * 37) % 9000 for r in range(20_000)]
    assert torch.equal(arrays(batch.host()), arrays(batch.on_device()))


def test_one_request_of_many_tiles() -> None:
    batch = Batch(random.Random(2))
    batch.qo_lens, batch.kv_lens = [0, 131_072, 0, 1], [5, 131_072, 0, 9]
    assert torch.equal(arrays(batch.host()), arrays(batch.on_device()))


def test_into_keeps_the_buffer() -> None:
    batch = Batch(random.Random(3))
    batch.qo_lens, batch.kv_lens, batch.slack = [1] * 9, [900] * 9, 20
    old = batch.on_device()
    batch.qo_lens, batch.kv_lens = [1, 2, 0, 1, 5, 1, 1, 1, 1], [7, 4000, 0, 1, 64, 65, 3, 2, 1]
    batch.slack = 29 - sum(batch.qo_lens)
    new = batch.on_device(into=old)
    assert new.buffer.data_ptr() == old.buffer.data_ptr()
    assert torch.equal(arrays(batch.host()), arrays(new))


def test_too_many_queries_make_an_empty_plan() -> None:
    batch = Batch(random.Random(4))
    batch.qo_lens, batch.kv_lens, batch.slack = [600] * 9, [900] * 9, -5000
    plan = batch.on_device().host()
    assert plan.num_tiles == 0 and not plan.worker_tile.any() and not plan.pieces()


def test_lengths_below_zero_count_as_none() -> None:
    batch = Batch(random.Random(5))
    batch.positions = False
    batch.qo_lens, batch.kv_lens, batch.slack = [1, 1, 1], [-4, 500, -1], 0
    got = arrays(batch.on_device())
    batch.kv_lens = [0, 500, 0]
    assert torch.equal(arrays(batch.host()), got)
