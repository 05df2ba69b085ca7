"""What the layers of both frameworks may add to plain attention, and what the engine is given for it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from attnloom import Attention, Variant, variants
from attnloom.core.params import Value


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


def plan_id(engine: Attention, own: tuple[object, ...]) -> Hashable:
    """Layers with the same one share a plan. A range that the variant declares may depend on its parameters.

    Args:
        engine: of the layer.
        own: what the layer's parameters are made from.
    """
    if not engine.variant.visible:
        return engine.plan_key
    return engine.plan_key, *map(id, (*engine.variant.captures.values(), *own))
