"""Draft trees: each draft sees the prefix, its ancestors and itself, by a packed mask over the drafts."""

from __future__ import annotations

import random

import pytest
import torch

from attnloom import variants
from attnloom.core.layout import BlockSparseLayout
from tests.core import kernels
from tests.core.planning import indptr
from tests.core.storage import caches
from tests.oracle import Array, At, Band, DenseRequest, Hooks, attention
from tests.tolerance import assert_lse, assert_out


def _ancestors(parents: list[int], draft: int) -> set[int]:
    """The drafts that `draft` sees, itself included, by walking up."""
    seen = set()
    while draft >= 0:
        seen.add(draft)
        draft = parents[draft]
    return seen


@pytest.mark.parametrize("num_workers", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_draft_trees(seed: int, num_workers: int) -> None:
    rng = random.Random(seed)
    prefixes = [0, 150, 64, 7]
    parents = [[rng.randrange(-1, i) for i in range(n)] for n in (5, 12, 1, 20)]
    total = [prefix + len(tree) for prefix, tree in zip(prefixes, parents, strict=True)]
    free = list(range(1, sum(total) + 5))
    rng.shuffle(free)
    slots = [[free.pop() for _ in range(count)] for count in total]
    layout, params = BlockSparseLayout.from_tree([torch.tensor(row, dtype=torch.int32) for row in slots], parents)

    gen = torch.Generator().manual_seed(seed)
    k_cache, v_cache = caches("hnd", sum(total) + 5, 1, 2, 64, 64, torch.float32)
    for slot in (slot for row in slots for slot in row):
        k_cache[slot, 0] = torch.randn(2, 64, generator=gen)
        v_cache[slot, 0] = torch.randn(2, 64, generator=gen)
    q = torch.randn(sum(map(len, parents)), 6, 64, generator=gen)

    requests, row = [], 0
    for ids, tree in zip(slots, parents, strict=True):
        k, v = (torch.stack([cache[slot, 0] for slot in ids]) for cache in (k_cache, v_cache))
        requests.append(DenseRequest(q[row : row + len(tree)], k, v, list(range(len(ids)))))
        row += len(tree)

    def seen(at: At) -> Array:
        prefix, tree = prefixes[at.request], parents[at.request]
        rows = [
            [j < prefix or j - prefix in _ancestors(tree, i) for j in range(prefix + len(tree))]
            for i in range(len(tree))
        ]
        return torch.tensor(rows).numpy()

    answer = attention(requests, band=Band(None, None), hooks=Hooks(logits_mask=seen))
    engine = kernels.engine_of(variants.PackedMask())
    plan = engine.plan(indptr([len(tree) for tree in parents]), layout, num_workers=num_workers)
    out, lse = engine.run(plan, q, k_cache, v_cache, params=params, return_lse=True)
    assert_out(out, answer, 64, torch.float32)
    assert_lse(lse, answer, 64)


def test_positions_follow_the_depth_in_the_tree() -> None:
    """Prefix of 3, then two children of the prefix, and a child of the first."""
    layout, _ = BlockSparseLayout.from_tree([torch.arange(6, dtype=torch.int32)], [[-1, -1, 0]])
    assert layout.positions is not None
    assert layout.positions.tolist() == [0, 1, 2, 3, 3, 4]
