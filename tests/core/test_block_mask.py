"""Declared ranges and block masks: what is skipped never changes the result, and it is really skipped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnloom import Attention, BlockSparseLayout, Param, Variant
from attnloom.core.block_mask import BlockMask

CHUNK = 96
HEADS, KV_HEADS, DIM = 4, 2, 64

CHUNKED_MASK = Variant(
    "chunked_mask",
    (Param("chunk", torch.int64),),
    logits_mask="return kv_pos / params.chunk == q_pos / params.chunk;",
)
CHUNKED_RANGE = Variant(
    "chunked_range",
    (Param("chunk", torch.int64),),
    logits_mask="return kv_pos / params.chunk == q_pos / params.chunk;",
    visible="return Range{int(q_first < 0 ? 0 : q_first / params.chunk * params.chunk), kv_len};",
    mask_free=(
        "return Range{int(q_last / params.chunk * params.chunk), int((q_first / params.chunk + 1) * params.chunk)};"
    ),
)
CAUSAL = Variant("causal", right=0)


def problem(generator: torch.Generator) -> tuple[Tensor, BlockSparseLayout, Tensor, Tensor, Tensor]:
    kv_lens = torch.tensor([700, 0, 33, 259], dtype=torch.int32)
    qo_lens = torch.tensor([700, 2, 1, 130], dtype=torch.int32)
    indptr = torch.nn.functional.pad(qo_lens.cumsum(0), (1, 0)).to(torch.int32)
    page = 16
    table = torch.randperm(4 * 44, generator=generator).to(torch.int32).view(4, 44)
    cache = torch.randn(4 * 44, KV_HEADS, page, 2 * DIM, generator=generator).transpose(1, 2)
    q = torch.randn(int(indptr[-1]), HEADS, DIM, generator=generator)
    return indptr, BlockSparseLayout.from_page_table(table, kv_lens, page), q, cache[..., :DIM], cache[..., DIM:]


def expected(indptr: Tensor, layout: BlockSparseLayout, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, length in enumerate(layout.lengths.tolist()):
        begin, end = int(indptr[row]), int(indptr[row + 1])
        start = int(layout.starts[row])
        slots = [int(layout.indices[start + j // 16]) * 16 + j % 16 for j in range(length)]
        keys = k.reshape(-1, KV_HEADS, DIM)[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
        values = v.reshape(-1, KV_HEADS, DIM)[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
        for token in range(begin, end):
            position = length - (end - begin) + token - begin
            seen = [
                j
                for j in range(length)
                if position >= 0 and j // CHUNK == position // CHUNK and (not causal or j <= position)
            ]
            if seen:
                scores = torch.einsum("hd,khd->hk", q[token].double(), keys[seen]) * DIM**-0.5
                out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_workers", [1, 7])
def test_skipping_tiles_changes_nothing_but_the_work(causal: bool, num_workers: int) -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    indptr, layout, q, k, v = problem(generator)
    params = {"chunk": CHUNK}
    oracle = expected(indptr, layout, q, k, v, causal=causal)
    executed = {}
    for name, variant in (("all", CHUNKED_MASK), ("mask", CHUNKED_MASK), ("range", CHUNKED_RANGE)):
        engine = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=CAUSAL & variant if causal else variant)
        mask = engine.block_mask(700, params=params) if name == "mask" else None
        plan = engine.plan(indptr, layout, num_workers=num_workers, params=params, block_mask=mask)
        out = engine.run(plan, q, k, v, params=params)
        torch.testing.assert_close(out.double(), oracle, atol=1e-5, rtol=1e-5)
        executed[name] = int(plan.worker_tiles().sum())
    assert executed["mask"] < 0.6 * executed["all"]
    assert executed["range"] < (1.01 if causal else 0.8) * executed["all"]


def test_queries_before_the_first_position() -> None:
    """More queries than keys: those at negative positions see what the mask says of them, not what block 0 sees."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    indptr, layout, q, k, v = problem(generator)
    layout.lengths.copy_(torch.tensor([300, 0, 33, 20]))
    near = Variant("near", logits_mask="return (q_pos >= 0) & (abs(q_pos - kv_pos) < 300);")
    engine = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=near)
    skipping = engine.plan(indptr, layout, num_workers=5, block_mask=engine.block_mask(512))
    out, lse = engine.run(skipping, q, k, v, return_lse=True)
    expected, expected_lse = engine.run(engine.plan(indptr, layout, num_workers=5), q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert bool((lse[:400] == -torch.inf).all())


def test_a_plan_with_a_block_mask_is_right_for_shorter_true_lengths() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    indptr, layout, q, k, v = problem(generator)
    engine = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=CHUNKED_MASK)
    mask = engine.block_mask(1024, params={"chunk": CHUNK})
    planned = layout.lengths.clone()
    layout.lengths.copy_(torch.tensor([700, 0, 1, 131]))
    plan = engine.plan(indptr, layout, kv_lens=planned, num_workers=5, block_mask=mask)
    out = engine.run(plan, q, k, v, params={"chunk": CHUNK})
    torch.testing.assert_close(out.double(), expected(indptr, layout, q, k, v, causal=False), atol=1e-5, rtol=1e-5)


def test_a_mask_for_a_few_positions_is_whole_in_its_block() -> None:
    """It covers the block, and a longer request may come."""
    near = Variant("near", right=0, logits_mask="return q_pos - kv_pos < 20;")
    engine = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=near)
    mask = engine.block_mask(3)
    assert mask.covers(64) and torch.equal(mask.kinds, engine.block_mask(64).kinds)
    position = torch.arange(64)
    dense = position[:, None] - position[None, :] < 20
    assert torch.equal(mask.kinds, BlockMask.from_dense(dense, 64).kinds)


def test_the_computed_block_mask_is_the_dense_one_in_blocks() -> None:
    engine = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=CHUNKED_MASK)
    mask = engine.block_mask(500, params={"chunk": CHUNK})
    assert mask is engine.block_mask(512, params={"chunk": CHUNK}), "computed once"
    position = torch.arange(512)
    dense = position[:, None] // CHUNK == position[None, :] // CHUNK
    assert torch.equal(mask.kinds, BlockMask.from_dense(dense, 64).kinds)
    assert mask.density < 0.5


def test_what_a_comment_says_of_indices_is_no_index() -> None:
    spoken = Variant("q_index", logits_mask="// not by kv_index, nor\n/* by q_index */ return kv_pos < 70;")
    kinds = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=spoken).block_mask(192).kinds
    dense = (torch.arange(256) < 70).expand(256, 256)
    assert torch.equal(kinds, BlockMask.from_dense(dense, 64).kinds)
    read = Variant("read", logits_mask="return kv_index < 70; // a slot")
    with pytest.raises(ValueError, match="the mask of read is over q_index and kv_index"):
        Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=read).block_mask(192)


def test_bad_block_masks_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    indptr, layout, q, k, v = problem(generator)
    engine = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=CHUNKED_MASK)
    kinds = torch.full((1, 16, 16), 2, dtype=torch.uint8)
    for mask, message in (
        (BlockMask(kinds, 32), "block_mask.block_size=32"),
        (BlockMask(kinds[:, :4, :4].contiguous(), 64), "700 positions"),
        (BlockMask(kinds.repeat(3, 1, 1), 64), r"block_mask.kinds.shape\[0\]=3"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.plan(indptr, layout, params={"chunk": CHUNK}, block_mask=mask)
    plain = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=Variant("full"))
    masked = engine.plan(indptr, layout, params={"chunk": CHUNK}, block_mask=BlockMask(kinds, 64))
    with pytest.raises(ValueError, match=r"plan\.key"):
        plain.run(masked, q, k, v)
    with pytest.raises(ValueError, match="block_mask: expected None for full, which has no logits_mask"):
        plain.plan(indptr, layout, block_mask=BlockMask(kinds, 64))
    with pytest.raises(ValueError, match="kinds=7"):
        BlockMask(torch.full((1, 1, 1), 7, dtype=torch.uint8), 64)
    with pytest.raises(ValueError, match="has none"):
        Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=CAUSAL).block_mask(64)
