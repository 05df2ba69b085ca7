"""What the layers of both frameworks may add to plain attention, and what the engine is given for it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from attnloom import Attention, Variant, variants
from attnloom.core.params import Value
from attnloom.core.position_mask import PositionMask


def layer_score(
    *, soft_cap: bool = False, temperature: bool = False, alibi: bool = False, sinks: bool = False
) -> Variant | None:
    """What a layer does to its scores, in the order in which it acts; None where that is nothing."""
    score: Variant | None = None
    for asked, made in (
        (soft_cap, variants.SoftCap),
        (temperature, variants.GrokTemperature),
        (alibi, variants.ALiBi),
        (sinks, variants.Sinks),
    ):
        if asked:
            score = made() if score is None else score & made()
    return score


def layer_params(
    variant: Variant,
    *,
    logit_cap: float | None = None,
    temperature_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Value]:
    """The variant's run-time parameters that the layer itself has, by name.

    Sinks are converted every time: weights may be loaded again at any moment, and there is one number per head.
    """
    own: dict[str, Value | None] = {
        "logit_cap": logit_cap,
        "temperature_len": temperature_len,
        "alibi_slopes": alibi_slopes,
        "sinks": None if sinks is None else sinks.to(torch.float32),
    }
    given: dict[str, Value] = {}
    for param in variant.params:
        value = own.get(param.name)
        if value is not None and param.name not in variant.captures:
            given[param.name] = value
    return given


LONGEST_KEPT_MASK = 1 << 19
"""Positions of the longest block mask that is kept: 64 MiB."""


def kept_mask(engine: Attention, length: int, params: dict[str, Value]) -> PositionMask | None:
    """The block mask to plan an engine's steps with, so that they skip what its mask hides; None where there is none.

    A range that the variant declares says what is hidden; a mask that reads tensors or the request may change any time.

    Args:
        engine: of a layer, or of layers with the same plan id.
        length: of the longest request that may be served.
        params: that the layer itself has.
    """
    variant = engine.variant
    if variant.visible or not variant.masks_by_position or variant.right != 0 or length > LONGEST_KEPT_MASK:
        return None
    return engine.position_mask(length, params=params)


def plan_id(engine: Attention, own: tuple[object, ...]) -> Hashable:
    """Layers with the same one share a plan.

    A range that the variant declares may depend on its parameters, and so may the blocks that its mask hides. Variants
    of one name may differ, and have kernels of their own.

    Args:
        engine: of the layer.
        own: what the layer's parameters are made from.
    """
    variant = engine.variant
    if variant.visible:
        return engine.plan_key, *map(id, (engine.spec, *variant.captures.values(), *own))
    if variant.masks_by_position:  # a plan with the mask's blocks is its variant's, with its numbers
        values = (*variant.captures.values(), *own)
        return engine.plan_key, id(engine.spec), *(None if isinstance(value, Tensor) else value for value in values)
    return engine.plan_key
