"""Tree masks of speculative decoding become packed masks over the drafts alone."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom.adapters.draft_tree import branch_masks, tail_masks
from attnloom.adapters.token_table import TokenTable, slot_cache
from tests.oracle import Array, At, Band, DenseRequest, Hooks, attention
from tests.tolerance import assert_out

HEADS, KV_HEADS, DIM = 4, 2, 64
PREFIXES = (0, 5, 64, 70)
PITCH = 128


def tree(drafts: int) -> torch.Tensor:
    """Each draft sees itself, and what a random earlier one sees."""
    seen = torch.eye(drafts, dtype=torch.bool)
    for draft in range(1, drafts):
        parent = int(torch.randint(-1, draft, ()))
        if parent >= 0:
            seen[draft] |= seen[parent]
    return seen


def check(
    params: dict[str, torch.Tensor], visible: list[torch.Tensor], lengths: list[int], queries: int, left: int | None
) -> None:
    """The engine over shuffled slots, and the oracle with the mask that each request is meant to have."""
    requests = len(lengths)
    table = torch.randperm(requests * PITCH).to(torch.int32).view(requests, PITCH)
    keys, values = (torch.randn(requests * PITCH, KV_HEADS, DIM) for _ in range(2))
    q = torch.randn(requests * queries, HEADS, DIM)
    visibility = attnloom.variants.Full() if left is None else attnloom.Variant("window_before", left=left)
    engine = attnloom.Attention(
        HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=visibility & attnloom.variants.PackedMask()
    )
    layout = TokenTable.of(table).layout(torch.arange(requests), torch.tensor(lengths, dtype=torch.int32))
    plan = engine.plan(torch.arange(requests + 1, dtype=torch.int32) * queries, layout, params=params)
    out = engine.run(plan, q, slot_cache(keys), slot_cache(values), params=params)
    dense = []
    for request, length in enumerate(lengths):
        slots = table[request, :length].long()
        own = q[request * queries : (request + 1) * queries]
        dense.append(DenseRequest(own, keys[slots], values[slots], list(range(length))))

    def mask(at: At) -> Array:
        return visible[at.request].numpy()

    assert_out(
        out, attention(dense, band=Band(left=left, right=None), hooks=Hooks(logits_mask=mask)), DIM, torch.float32
    )


@pytest.mark.parametrize("drafts", [1, 3, 8, 13])
@pytest.mark.parametrize("whole", [False, True], ids=["drafts_only", "with_the_prefix"])
@pytest.mark.parametrize("left", [None, 6])
def test_trees(drafts: int, whole: bool, left: int | None) -> None:
    """Both forms of SGLang's mask, also in a buffer that is longer than the step needs."""
    torch.manual_seed(drafts)
    trees = [tree(drafts) for _ in PREFIXES]
    visible = [
        torch.cat([torch.ones(drafts, prefix, dtype=torch.bool), own], 1)
        for prefix, own in zip(PREFIXES, trees, strict=True)
    ]
    flat = torch.cat([part.flatten() for part in (visible if whole else trees)])
    flat = torch.cat([flat, torch.zeros(1000, dtype=torch.bool)])
    params = tail_masks(flat, torch.tensor(PREFIXES), drafts, with_prefix=whole)
    assert params["packed_mask"].numel() == -(-len(PREFIXES) * drafts * drafts // 8)
    check(params, visible, [prefix + drafts for prefix in PREFIXES], drafts, left)


def test_a_mask_that_is_too_short_is_named() -> None:
    with pytest.raises(ValueError, match="mask"):
        tail_masks(torch.ones(17, dtype=torch.bool), torch.tensor([4, 4]), 3, with_prefix=False)


@pytest.mark.parametrize("branches", [2, 4])
@pytest.mark.parametrize("step", [0, 2])
def test_branches_of_a_draft_see_the_prefix_and_themselves(branches: int, step: int) -> None:
    torch.manual_seed(branches)
    stride = 3
    lengths = [prefix + (branches - 1) * stride + step + 1 for prefix in PREFIXES]
    visible = []
    for prefix, length in zip(PREFIXES, lengths, strict=True):
        seen = torch.zeros(branches, length, dtype=torch.bool)
        seen[:, :prefix] = True
        for branch in range(branches):
            seen[branch, prefix + branch * stride : prefix + branch * stride + step + 1] = True
        visible.append(seen)
    params = branch_masks(torch.tensor(PREFIXES), branches, stride, step)
    check(params, visible, lengths, branches, None)
