"""The block mask that a server keeps: evaluated as far as positions have come; what it skips changes no result."""

from __future__ import annotations

import random

import pytest
import torch

from attnloom import mask_mod, variants
from attnloom.core.attention import Attention
from attnloom.core.block_mask import HIDDEN, PARTIAL
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.position_mask import PositionMask
from attnloom.core.variant import Param, Variant
from tests.core.planning import indptr
from tests.core.problem import make_problem
from tests.oracle import Band, Hooks
from tests.tolerance import assert_out

BIASES = torch.randn(512)
SEEN = torch.rand(512, 512) < 0.5


def strided(b, h, q_idx, kv_idx):
    """Local, and every 256th key in heads that are even."""
    return (q_idx - kv_idx < 40) | ((kv_idx % 256 == 0) & (h % 2 == 0))


STRIDED = variants.Causal() & mask_mod(strided)
SCALED = variants.Causal() & Variant(
    "local", (Param("reach", torch.int64),), logits_mask="return q_pos - kv_pos < params.reach;"
)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (STRIDED, True),
        (SCALED, True),
        (variants.ChunkedLocal(64), True),
        (SCALED & variants.ALiBi(), True),
        (Variant("m", logits_mask="return head_dim > q_head + kv_head + q_pos % 2; // per request"), True),
        (Variant("m", logits_mask="return head_dim > q_pos + request; /* per request */"), False),
        (Variant("m", logits_mask='#line 3 "/home/request/index.py"\nreturn q_pos > 3;'), True),
        (Variant("m", (Param("t", shape=(None,)),), logits_mask="return params.t[kv_pos] > 0;"), False),
        (Variant("m", (Param("t"),), logits_mask="const auto& p = params;\nreturn p.t > 0;"), False),
        (Variant("m", logits_mask="return kv_index < 9;"), False),
        (mask_mod(lambda b, h, q, k: (b > 0) | (q >= k)), False),
        (mask_mod(lambda b, h, q, k: SEEN[q, k]), False),
        (mask_mod(lambda b, h, q, k: q - k < 8), True),
        (SCALED & mask_mod(lambda b, h, q, k: SEEN[q, k]), False),
        (variants.PackedMask(), False),
        (variants.PrefixLM(), False),
        (variants.DocumentMask(), False),
        (variants.Causal(), False),
        (variants.SoftCap(), False),
    ],
)
def test_which_masks_are_over_positions(variant: Variant, expected: bool) -> None:
    assert variant.masks_by_position is expected


def test_it_is_evaluated_as_far_as_positions_have_come() -> None:
    engine = Attention(4, 2, 64, dtype=torch.float32, variant=STRIDED)
    whole = engine.block_mask(640).kinds
    kept = engine.position_mask(640)
    memory = kept.mask.kinds.data_ptr()
    assert (kept.mask.kinds == PARTIAL).all()
    for length, known in ((1, 1), (64, 1), (65, 2), (300, 5), (130, 5), (640, 10)):
        mask = kept.up_to(length)
        assert mask is kept.mask and mask.kinds.data_ptr() == memory
        assert kept.known == known
        for q_block in range(10):
            row, wanted = mask.kinds[0, q_block], whole[0, q_block]
            if q_block < known:
                assert torch.equal(row[: q_block + 1], wanted[: q_block + 1])
            else:
                assert (row == PARTIAL).all()
    assert int((whole == HIDDEN).sum()) > 20
    assert kept.up_to(641) is None


def test_nothing_is_evaluated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnloom.core import launch

    parts = []
    fill = launch.fill_block_mask
    monkeypatch.setattr(launch, "fill_block_mask", lambda *args: (parts.append(args[-1]), fill(*args)))
    kept = Attention(4, 2, 64, dtype=torch.float32, variant=STRIDED).position_mask(2000)
    for length in (100, 90, 100, 128, 129, 129, 1000, 1000):
        kept.up_to(length)
    assert parts == [(0, 2, 2), (2, 3, 3), (3, 16, 16)]


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_served_batch_skips_what_is_hidden(num_workers: int, batch_invariant: bool) -> None:
    """Chunked prefill and decode of some requests, step by step as a server plans them."""
    lengths = [900, 70, 1500]
    problem = make_problem(lengths, lengths, num_qo_heads=4, num_kv_heads=2, block_size=16)

    def seen(at):
        return (at.q_pos - at.kv_pos < 40) | ((at.kv_pos % 256 == 0) & (at.q_head % 2 == 0))

    answer = problem.answer(Band(None, 0), Hooks(logits_mask=seen)).out
    engine = Attention(4, 2, 64, dtype=torch.float32, variant=STRIDED, batch_invariant=batch_invariant)
    kept = engine.position_mask(1600)
    first = indptr(lengths).tolist()
    rng = random.Random(3)
    done = [0, 0, 0]
    executed = skipping = 0
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        requests = [r for r in range(3) if done[r] < lengths[r]]
        rng.shuffle(requests)
        ends = [min(lengths[r], done[r] + rng.choice((1, 1, 200, 333))) for r in requests]
        layout = BlockSparseLayout(
            16, problem.layout.starts[requests], torch.tensor(ends, dtype=torch.int32), problem.layout.indices
        )
        counts = indptr([end - done[r] for r, end in zip(requests, ends, strict=True)])
        q = torch.cat([problem.q[first[r] + done[r] : first[r] + end] for r, end in zip(requests, ends, strict=True)])
        outs = []
        for mask in (None, kept.up_to(max(ends))):
            plan = engine.plan(counts, layout, num_workers=num_workers, block_mask=mask)
            outs.append(engine.run(plan, q, problem.k_cache, problem.v_cache))
            tiles = int(plan.worker_tiles().sum())
            executed, skipping = (executed + tiles, skipping) if mask is None else (executed, skipping + tiles)
        torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=2e-6)
        for r, end, rows in zip(requests, ends, outs[1].split(counts.diff().tolist()), strict=True):
            for i in range(end - done[r]):
                wanted = torch.from_numpy(answer[first[r] + done[r] + i])
                torch.testing.assert_close(rows[i].double(), wanted, atol=2e-5, rtol=2e-5)
        for r, end in zip(requests, ends, strict=True):
            done[r] = end
    if batch_invariant:
        assert skipping == executed, "there a plan counts hidden tiles"
    else:
        assert skipping < 0.5 * executed


def test_blocks_that_are_not_known_yet_are_right() -> None:
    """A plan for more than was evaluated: upper bounds of lengths, or another request's."""
    engine = Attention(4, 2, 64, dtype=torch.float32, variant=SCALED)
    problem = make_problem([700, 1], [700, 555])
    kept = engine.position_mask(1024, params={"reach": 30})
    kept.up_to(200)
    plan = engine.plan(problem.qo_indptr, problem.layout, block_mask=kept.mask, params={"reach": 30})
    out = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params={"reach": 30})
    answer = problem.answer(Band(None, 0), Hooks(logits_mask=lambda at: at.q_pos - at.kv_pos < 30))
    assert isinstance(out, torch.Tensor)
    assert_out(out, answer, 64, torch.float32)


def test_what_it_cannot_be_made_for() -> None:
    def engine(variant: Variant) -> Attention:
        return Attention(4, 2, 64, dtype=torch.float32, variant=variant)

    with pytest.raises(ValueError, match="packed_mask: expected a logits_mask over positions"):
        PositionMask(engine(variants.Causal() & variants.PackedMask()), 64, [])
    with pytest.raises(ValueError, match=r"variant\.right=None of local: expected 0, a causal variant"):
        PositionMask(engine(Variant("local", logits_mask="return q_pos - kv_pos < 9;")), 64, [])
    with pytest.raises(ValueError, match="length=0"):
        engine(STRIDED).position_mask(0)
    with pytest.raises(ValueError, match="missing \\['reach'\\]"):
        engine(SCALED).position_mask(64)
