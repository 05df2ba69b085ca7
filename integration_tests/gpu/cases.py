"""Random batches: what is drawn for one, as numbers that a failing test can print."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from integration_tests.gpu.kernels import Kernel
from integration_tests.gpu.storage import DEVICE, STORAGES

GROUPS = (1, 1, 2, 3, 4, 4, 5, 7, 8, 12, 16, 17, 40, 64, 128)
BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 16, 24, 32, 64, 100)
TABLES = ("page_table", "csr", "scattered", "token_table")
WORKERS = (1, 7, 24, 264, 300, None)
EDGES = (63, 64, 65, 127, 128, 129, 256)
_MOST_PAIRS = 1 << 22  # of (query head, query, key) of a request: what the oracle's matrices hold


@dataclass(frozen=True)
class Case:
    """One batch for a kernel.

    Attributes:
        seed: of everything that is not here.
        qo_lens, kv_lens: true lengths.
        planned: lengths that the planner is told; a plan is right for any.
        left, right: band of the variant.
        positions: blocks stand apart.
        trees: parents of the drafts of each request, where the batch is one of draft trees.
        planner: "host", "device", or "into", an old plan's buffer.
        block_mask: the plan has one.
        mode: what is asked for: "out", "lse" or "state".
    """

    seed: int
    num_kv_heads: int
    group: int
    block_size: int
    storage: str
    table: str
    qo_lens: list[int]
    kv_lens: list[int]
    planned: list[int]
    left: int | None
    right: int | None
    positions: bool
    trees: list[list[int]] | None
    num_workers: int | None
    planner: str
    block_mask: bool
    mode: str
    sm_scale: float | None
    k_scale: float
    v_scale: float

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def total_q(self) -> int:
        return sum(self.qo_lens)


def draw(kernel: Kernel, index: int, num_workers: Sequence[int | None] = WORKERS) -> Case:
    """The ``index``-th case of a kernel."""
    rng = random.Random(f"{kernel} {index}")
    group = rng.choice(GROUPS)
    num_kv_heads = rng.choice((1, 2, 3, 8))
    if group * num_kv_heads > 128:
        num_kv_heads = 1
    requests = rng.randint(1, 6)
    kv_lens = _kv_lens(rng, requests)
    qo_lens = [_qo_len(rng, group) for _ in range(requests)]
    trees = None
    if kernel.name == "packed mask" and rng.random() < 0.5:
        qo_lens = [rng.choice((0, 1, rng.randint(1, 30))) for _ in range(requests)]
        kv_lens = [length + queries for length, queries in zip(kv_lens, qo_lens, strict=True)]
        trees = [[rng.randint(-1, draft - 1) for draft in range(queries)] for queries in qo_lens]
    for request in range(requests):
        pairs = group * num_kv_heads * qo_lens[request] * kv_lens[request]
        if trees is None and pairs > _MOST_PAIRS:
            qo_lens[request] = max(1, _MOST_PAIRS // (group * num_kv_heads * kv_lens[request]))
    left, right = _band(rng)
    if kernel.case.band is not None or trees is not None:
        left, right = kernel.case.band or (None, None)
    block_size = rng.choice(BLOCK_SIZES)
    table = rng.choice(TABLES)
    positions = trees is None and rng.random() < 0.2
    if trees is not None or table == "token_table":
        block_size = 1
    on_gpu = DEVICE.type == "cuda"
    return complete(
        rng,
        kernel,
        (0, 0, 1, 200, 200, -100),
        num_kv_heads=num_kv_heads,
        group=group,
        block_size=block_size,
        table=table,
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        left=left,
        right=right,
        positions=positions,
        trees=trees,
        num_workers=rng.choice(num_workers),
        planner=rng.choice(("host", "host", "device", "into")) if on_gpu else "host",
    )


def complete(rng: random.Random, kernel: Kernel, slacks: Sequence[int], **given: Any) -> Case:
    """A case of which what is not given is drawn: where and how it lies, what is planned, what is asked for.

    Args:
        slacks: up to how far planned lengths are from the true ones.
    """
    slack = rng.choice(slacks)
    scaled = kernel.kv_dtype != kernel.dtype
    return Case(
        **given,
        seed=rng.randrange(2**31),
        storage=rng.choice(STORAGES),
        planned=[max(0, length + rng.randint(min(0, slack), max(0, slack))) for length in given["kv_lens"]],
        block_mask=kernel.case.by_position and not given["positions"] and rng.random() < 0.5,
        mode=rng.choice(("out", "lse", "lse", "state")),
        sm_scale=rng.choice((None, None, 0.2, -0.1)),
        k_scale=rng.choice((1.0, 0.5)) if scaled else 1.0,
        v_scale=rng.choice((1.0, 2.5)) if scaled else 1.0,
    )


def _kv_lens(rng: random.Random, requests: int) -> list[int]:
    longest = rng.choice((5, 70, 400, 400, 2000))
    return [rng.choice((0, 1, rng.randint(0, longest), longest, rng.choice(EDGES))) for _ in range(requests)]


def _qo_len(rng: random.Random, group: int) -> int:
    """Nothing, decode, what about fills a short tile, append, prefill."""
    return rng.choice((0, 1, 1, rng.randint(1, 3 + 16 // group), rng.randint(0, 40), rng.randint(0, 300)))


def _band(rng: random.Random) -> tuple[int | None, int | None]:
    window = rng.choice((0, 1, 15, 63, 64, 100, 200))
    return rng.choice(((None, 0), (None, 0), (None, 0), (None, None), (window, 0), (window, window)))
