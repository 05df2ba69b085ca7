"""The device planner gives the host's plan, word for word."""

from __future__ import annotations

import math
import random

import pytest
import torch

from attnloom.core.block_mask import BlockMask
from attnloom.core.device_planner import plan_on_device
from attnloom.core.plan import Plan
from integration_tests.gpu.planning import Batch, arrays, gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BATCHES = 10_000


def batch_of(rng: random.Random) -> Batch:
    return Batch(rng, gpu())


def on_device(batch: Batch, block_mask: BlockMask | None = None, into: Plan | None = None) -> Plan:
    return plan_on_device(batch.given(gpu(), block_mask), total_q=batch.total_q, into=into)


def test_ten_thousand_batches() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for index in range(BATCHES):
        batch = batch_of(rng)
        expected, got = arrays(batch.host()), arrays(on_device(batch))
        assert torch.equal(expected, got), f"seed {seed}, batch {index}: {vars(batch)}"


def test_block_masks() -> None:
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    for index in range(200):
        batch = batch_of(rng)
        batch.positions = False
        batch.kv_lens = [length % 3000 for length in batch.kv_lens]
        batch.qo_lens = [min(queries, length) for queries, length in zip(batch.qo_lens, batch.kv_lens, strict=True)]
        blocks = math.ceil(3000 / batch.key.tile_kv)
        requests = rng.choice([1, max(len(batch.kv_lens), 1)])
        if requests > 50:
            requests = 1
        kinds = torch.randint(0, 3, (requests, blocks, blocks), generator=generator, dtype=torch.uint8)
        host = batch.host(BlockMask(kinds, batch.key.tile_kv))
        got = on_device(batch, BlockMask(kinds.to(gpu()), batch.key.tile_kv))
        assert torch.equal(arrays(host), arrays(got)), f"case {index}: {vars(batch)}"


@pytest.mark.parametrize("qo_lens", [(1,), (40,), (1, 40)])
def test_twenty_thousand_requests(qo_lens: tuple[int, ...]) -> None:
    """More tiles than keep their prefix sum in shared memory; tall ones, short ones, or both in any order."""
    rng = random.Random(1)
    batch = batch_of(rng)
    batch.key = batch.key._replace(tile_q_short=16, tile_q=64, num_qo_heads=4 * batch.key.num_kv_heads)
    batch.qo_lens = rng.choices(qo_lens, k=20_000)
    batch.kv_lens = [(r * 37) % 9000 for r in range(20_000)]
    assert torch.equal(arrays(batch.host()), arrays(on_device(batch)))


def test_one_request_of_many_tiles() -> None:
    batch = batch_of(random.Random(2))
    batch.qo_lens, batch.kv_lens = [0, 131_072, 0, 1], [5, 131_072, 0, 9]
    assert torch.equal(arrays(batch.host()), arrays(on_device(batch)))


def test_into_keeps_the_buffer() -> None:
    batch = batch_of(random.Random(3))
    batch.qo_lens, batch.kv_lens, batch.slack = [1] * 9, [900] * 9, 20
    old = on_device(batch)
    batch.qo_lens, batch.kv_lens = [1, 2, 0, 1, 5, 1, 1, 1, 1], [7, 4000, 0, 1, 64, 65, 3, 2, 1]
    batch.slack = 29 - sum(batch.qo_lens)
    new = on_device(batch, into=old)
    assert new.buffer.data_ptr() == old.buffer.data_ptr()
    assert torch.equal(arrays(batch.host()), arrays(new))


def test_too_many_queries_make_an_empty_plan() -> None:
    batch = batch_of(random.Random(4))
    batch.qo_lens, batch.kv_lens, batch.slack = [600] * 9, [900] * 9, -5000
    plan = on_device(batch).host()
    assert plan.num_tiles == 0 and not plan.worker_tile.any() and not plan.pieces()


def test_lengths_below_zero_count_as_none() -> None:
    batch = batch_of(random.Random(5))
    batch.positions = False
    batch.qo_lens, batch.kv_lens, batch.slack = [1, 1, 1], [-4, 500, -1], 0
    got = arrays(on_device(batch))
    batch.kv_lens = [0, 500, 0]
    assert torch.equal(arrays(batch.host()), got)
