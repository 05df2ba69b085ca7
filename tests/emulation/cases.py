"""Small random batches: what a CTA does with many keys it does with few."""

from __future__ import annotations

import random

from integration_tests.gpu.cases import Case, complete
from integration_tests.gpu.kernels import Kernel

KINDS = ("decode", "verify", "prefill", "mixed", "crowd", "long")


def draw(kernel: Kernel, kind: str, seed: int) -> Case:
    """A batch of a kind.

    Queries come as in decode, in the verification of drafts, in prefill, or as any of these. A crowd gives few workers
    more pieces than they hold at once (csrc/sm80/pieces.h); of a long request more workers have a piece than are merged
    at once, now and then more than there is room for weights of (csrc/sm80/merge.h).
    """
    rng = random.Random(f"{kernel} {kind} {seed}")
    num_kv_heads = rng.choice((1, 2, 3))
    group = rng.choice((1, 2, 3) if kind in ("prefill", "mixed") else (1, 2, 4, 5, 8))
    num_workers = rng.choice((1, 2, 3, 5, 7, 12))
    longest = rng.choice((40, 150, 330))
    kv_lens = [rng.choice((rng.randint(0, longest), longest, 64, 0, 129)) for _ in range(rng.randint(1, 4))]
    if kind == "prefill":
        kv_lens = [rng.randint(1, 200)]
    elif kind == "crowd":
        kv_lens = [rng.choice((rng.randint(0, 70), 0, 1)) for _ in range(rng.randint(10, 30))]
        num_kv_heads, num_workers = rng.choice((2, 3)), rng.choice((1, 2))
    elif kind == "long":
        kv_lens = [rng.randint(2100, 2600)]
        num_kv_heads, num_workers = 1, rng.choice((33, 40, 70))
    queries = {"mixed": KINDS[:3], "crowd": ("decode", "decode", "verify"), "long": KINDS[:3]}.get(kind, (kind,))
    qo_lens = [_queries(rng, rng.choice(queries), group) for _ in kv_lens]
    if kind == "long" and kernel.name == "plain" and rng.random() < 0.2:
        kv_lens, qo_lens, group, num_workers = [rng.randint(18_000, 20_000)], [1], 1, 290
    window = rng.choice((0, 15, 64, 100))
    left, right = rng.choice(((None, 0), (None, 0), (None, None), (window, 0), (window, window)))
    block_size = rng.choice((1, 1, 3, 16, 16, 32))
    table = rng.choice(("page_table", "csr", "scattered", "token_table"))
    return complete(
        rng,
        kernel,
        (0, 0, 100, -60),
        num_kv_heads=num_kv_heads,
        group=group,
        block_size=1 if table == "token_table" else block_size,
        table=table,
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        left=left,
        right=right,
        positions=rng.random() < 0.25,
        trees=None,
        num_workers=num_workers,
        planner="host",
    )


def _queries(rng: random.Random, kind: str, group: int) -> int:
    if kind == "decode":
        return rng.choice((1, 1, 1, 0))
    if kind == "verify":
        return rng.randint(1, max(1, 16 // group))
    return rng.randint(17, 150) // group + 1
