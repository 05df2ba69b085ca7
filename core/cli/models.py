"""From a model's configuration to the variants that a framework's backend asks the engine for.

What decides is what is compiled in: dtype, head size, hooks. Windows and bands are run-time, and so are heads per rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnloom.core.cli.catalogue import DTYPES, Dtype, dtype_named
from attnloom.core.cli.layers import combinations, unmatched

if TYPE_CHECKING:
    from attnloom.core.serving import Choice, Table
    from attnloom.core.variant import Variant

# Read in vLLM 0.32: which model types hand slopes to their attention layers, and which flags give layers a sink. Where
# a flag concerns sliding layers only, the others have none.
_ALIBI_TYPES = ("bloom",)
_SINK_TYPES = ("gpt_oss", "openai_privacy_filter")
_SOME_SINKS = (
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
    "swa_attention_sink_enabled",
    "attention_sinks",
)


@dataclass(frozen=True)
class Need:
    """A kernel that a model needs.

    Attributes:
        variant: what its layers compute.
        head_dim: elements of a head.
        dtype: of queries, caches and output.
        why: the layers, in words.
    """

    variant: Variant
    head_dim: int
    dtype: Dtype
    why: str


def needs(file: Path, dtype: Dtype | None = None, chosen: Choice | None = None) -> list[Need]:
    """The kernels of the model that a Hugging Face config.json describes.

    Args:
        file: config.json, or the folder that holds it.
        dtype: instead of the model's own.
        chosen: variants that a server adds; :mod:`attnloom.core.cli.layers` says which of them meet in a layer.

    Raises:
        ValueError: it is no such file, or a model that attnloom has no kernels for; the message says why.
        OSError: it cannot be read.
    """
    path = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}: expected a model's config.json") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a model's config.json, which is an object")
    # Models of text and images describe their language model one level down.
    text = {**config, **config.get("text_config", {})} if isinstance(config.get("text_config"), dict) else config
    if text.get("kv_lora_rank"):
        raise ValueError(
            f"{path}: kv_lora_rank={text['kv_lora_rank']}: multi-head latent attention is not supported yet"
        )
    found = dtype or _dtype(path, text, config)
    num_layers = _number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    tables: list[tuple[Table, ...]] = [()]
    guessed = ""
    if chosen is not None:
        try:
            tables = combinations(chosen, num_layers)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        strange = [pattern for _, pattern in unmatched(chosen, num_layers)] if num_layers is not None else []
        if strange:
            guessed = f"; {', '.join(map(repr, strange))} matches no name of a layer that is known: guessed"
    return [
        Need(variant, head_dim, found, f"{why}{guessed}")
        for head_dim in _head_dims(path, text)
        for variant, why in _variants(path, text, tables)
    ]


def _dtype(path: Path, *configs: Mapping[str, Any]) -> Dtype:
    for config in configs:
        for name in ("dtype", "torch_dtype"):
            if isinstance(config.get(name), str) and config[name] != "auto":
                try:
                    named = dtype_named(config[name])
                except ValueError as error:
                    raise ValueError(f"{path}: {error}; --dtype names another") from None
                # vLLM's --dtype auto serves float32 models in bfloat16.
                return DTYPES["bf16"] if named is DTYPES["fp32"] else named
    return DTYPES["bf16"]


def _head_dims(path: Path, config: Mapping[str, Any]) -> list[int]:
    heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    own = _number(config, "head_dim", "hidden_size_per_head")
    if own is None and (heads is None or hidden is None):
        raise ValueError(f"{path}: expected head_dim, or hidden_size and num_attention_heads")
    head_dim = own if own is not None else (hidden or 0) // (heads or 1)
    # Gemma 4: the full-attention layers have heads of their own size.
    return list(dict.fromkeys([head_dim, _number(config, "global_head_dim") or head_dim]))


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if isinstance(value := config.get(name), int) and value > 0:
            return value
    return None


def _variants(
    path: Path, config: Mapping[str, Any], combinations: list[tuple[Table, ...]]
) -> list[tuple[Variant, str]]:
    kind = str(config.get("model_type", ""))
    cap = config.get("attn_logit_softcapping")
    alibi = kind in _ALIBI_TYPES or config.get("alibi") is True
    some = [name for name in _SOME_SINKS if config.get(name)]
    if kind in _SINK_TYPES:
        sinks = {True: kind}
    elif some:
        sinks = {True: some[0], False: "the layers without one"}
    else:
        sinks = {False: ""}
    window = config.get("sliding_window")
    found = []
    for sink, why in sinks.items():
        words = [
            f"causal, window {window}" if window else "causal",
            *([f"soft cap {cap}"] if cap else []),
            *(["ALiBi"] if alibi else []),
            *([f"sinks ({why})"] if sink else [why] if why else []),
        ]
        for tables in combinations:
            variant = layer_variant(soft_cap=bool(cap), alibi=alibi, sinks=sink, tables=tables)
            found.append((variant, ", ".join([*words, *(f"{table.variant.name} (chosen)" for table in tables)])))
    return found


def layer_variant(*, soft_cap: bool, alibi: bool, sinks: bool, tables: tuple[Table, ...] = ()) -> Variant:
    """The compiled part of a layer's variant, in the order in which the backends compose it."""
    from attnloom.core.serving import layer_variant as composed
    from attnloom.core.variants import ALiBi, Causal, Sinks, SoftCap

    score: Variant | None = None
    for has, made in ((soft_cap, SoftCap), (alibi, ALiBi), (sinks, Sinks)):
        if has:
            score = made() if score is None else score & made()
    return composed(Causal(), score, tables)
