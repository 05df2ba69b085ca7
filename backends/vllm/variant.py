"""From the features of a vLLM layer to a variant of the engine."""

from __future__ import annotations

from collections.abc import Mapping

from attnloom import Variant, variants
from attnloom.backends.features import layer_score
from attnloom.core.serving import Choice, Table
from attnloom.core.serving import layer_variant as composed
from attnloom.core.serving_options import choice


def chosen_variants() -> Choice:
    """What `--additional-config '{"attnloom": {"variants": ...}}'` asks for: vLLM hands it on unread.

    Raises:
        ValueError, OSError: it cannot be read or served; vLLM stops while it builds the model.
    """
    # Imported late: it asks for the platform, which imports this module.
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    additional = config.additional_config
    chosen = choice(additional.get("attnloom") if isinstance(additional, Mapping) else None)
    if config.parallel_config.tensor_parallel_size > 1:
        chosen.check_one_rank()
    return chosen


def check_nothing_is_ignored() -> None:
    """Another backend would serve the model's own attention without a word: variants go with CUSTOM."""
    if chosen_variants().tables:
        raise ValueError("--additional-config names variants of attnloom: expected --attention-backend CUSTOM with it")


def layer_variant(
    *,
    causal: bool,
    sliding_window: int | None,
    soft_cap: bool,
    alibi: bool,
    sinks: bool,
    tables: tuple[Table, ...] = (),
) -> Variant:
    """The variant of a layer in a causal or a bidirectional step.

    vLLM counts a window of w keys with the query's own included. Where attention is bidirectional the window reaches
    w - 1 keys to both sides. Caps, slopes and sinks are numbers that the kernel is given when it runs.
    """
    if sliding_window is not None:
        visibility = variants.SlidingWindow(sliding_window, symmetric=not causal)
    else:
        visibility = variants.Causal() if causal else variants.Full()
    return composed(visibility, layer_score(soft_cap=soft_cap, alibi=alibi, sinks=sinks), tables)
