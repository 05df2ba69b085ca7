"""From the features of a vLLM layer to a variant of the engine."""

from __future__ import annotations

from attnloom import Variant, variants


def layer_variant(*, causal: bool, sliding_window: int | None, soft_cap: bool, alibi: bool, sinks: bool) -> Variant:
    """The variant of a layer in a causal or a bidirectional step.

    vLLM counts a window of w keys with the query's own included. Where attention is bidirectional the window reaches
    w - 1 keys to both sides. Caps, slopes and sinks are numbers that the kernel is given when it runs.
    """
    if sliding_window is not None:
        variant = variants.SlidingWindow(sliding_window, symmetric=not causal)
    else:
        variant = variants.Causal() if causal else variants.Full()
    if soft_cap:
        variant = variant & variants.SoftCap()
    if alibi:
        variant = variant & variants.ALiBi()
    if sinks:
        variant = variant & variants.Sinks()
    return variant
