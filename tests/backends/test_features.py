"""What backends of all frameworks share: which layers share a plan, and which block masks are kept for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnloom import Attention, Variant, variants
from attnloom.backends.features import LONGEST_KEPT_MASK, kept_mask, layer_params, plan_id
from attnloom.core.variant import Param

LOCAL = Variant("local", (Param("reach", torch.int64),), logits_mask="return q_pos - kv_pos < params.reach;")


def engine(variant: Variant) -> Attention:
    return Attention(4, 2, 64, dtype=torch.float32, variant=variant)


def reaching(reach: int) -> Variant:
    return variants.Causal() & replace(LOCAL, captures={"reach": reach})


def test_masks_that_are_kept() -> None:
    mask = kept_mask(engine(reaching(20)), 1000, {})
    assert mask is not None and mask.mask.covers(1000)
    up_to = mask.up_to(1000)
    assert up_to is not None and up_to.density < 0.6


@pytest.mark.parametrize(
    "variant",
    [
        variants.Causal(),
        variants.Causal() & variants.SoftCap(),
        variants.Causal() & variants.ChunkedLocal(64),  # declares its range
        variants.Full() & replace(LOCAL, captures={"reach": 20}),  # a bidirectional step
        variants.Causal() & variants.PackedMask(),
    ],
)
def test_variants_without_one(variant: Variant) -> None:
    assert kept_mask(engine(variant), 1000, {}) is None


def test_a_mask_that_would_be_too_long_is_not_kept() -> None:
    assert kept_mask(engine(reaching(20)), LONGEST_KEPT_MASK + 1, {}) is None


def test_layers_share_a_plan_where_their_masks_are_the_same() -> None:
    one, other, far = engine(reaching(20)), engine(reaching(20)), engine(reaching(30))
    assert plan_id(one, (None, None, None)) == plan_id(other, (None, torch.ones(4), None))
    assert plan_id(one, ()) != plan_id(far, ())
    namesake = engine(variants.Causal() & Variant("local", logits_mask="return q_pos - kv_pos < 20;"))
    assert namesake.spec.name == one.spec.name and plan_id(one, ()) != plan_id(namesake, ())
    plain = engine(variants.Causal())
    assert plan_id(one, ()) != plan_id(plain, ())
    assert plan_id(plain, (1.0,)) == plan_id(engine(variants.Causal() & variants.SoftCap()), (2.0,))


def test_a_number_that_the_layer_has_is_known_to_the_mask() -> None:
    """A mask may read what the layer itself brings: its soft cap, say."""
    variant = variants.Causal() & Variant("m", (Param("logit_cap"),), logits_mask="return q_pos < params.logit_cap;")
    small = engine(variant)
    params = layer_params(variant, logit_cap=70.0)
    mask = kept_mask(small, 200, params)
    assert mask is not None and (kinds := mask.up_to(200)) is not None
    assert [int(kinds.kinds[0, block, 0]) for block in range(4)] == [2, 1, 0, 0]
    assert plan_id(small, (70.0,)) != plan_id(small, (50.0,))
