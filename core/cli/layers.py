"""Which tables of a server's configuration meet in one layer, foreseen without the model.

A table acts on layers by their names, and these are the framework's: read in vLLM 0.32. Several schemes may go with a
configuration; one under which a pattern matches no layer does not, since the server would refuse it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnloom.core.serving import Choice, Table

_LAYERS = (
    "model.layers",  # nearly all
    "language_model.model.layers",  # the language model of those that read images or sound
    "model.decoder.layers",  # OPT, Whisper
    "transformer.h",  # GPT-2, GPT-J, BLOOM, Falcon
    "transformer.blocks",  # MPT
    "transformer.encoder.layers",  # ChatGLM
    "gpt_neox.layers",
)
MOST_LAYERS = 1000
"""More than any model has: a configuration with more is none, and all their names would not fit into memory."""
_ATTENTION = ("self_attn.attn", "attn.attn", "attention.attn", "self_attention.attn")


def combinations(chosen: Choice, num_layers: int | None) -> list[tuple[Table, ...]]:
    """The tables that act on a layer, for each set of them that occurs, in the order of the configuration.

    Args:
        chosen: the tables.
        num_layers: of the model. None, or names of layers that no scheme here has: what occurs is guessed to be the
            tables for every layer, alone (or none) and with each of those for some layers.

    Raises:
        ValueError: a pattern would match a layer of a deeper model, and matches none of this one; or the model is
            deeper than any.
    """
    if num_layers is not None:
        if num_layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers={num_layers}: expected at most {MOST_LAYERS}")
        for table, pattern in unmatched(chosen, num_layers):
            if _any_matches(pattern, MOST_LAYERS):
                raise ValueError(
                    f"{table.place}: layers: {pattern!r} matches no layer of this model, which has {num_layers}"
                )
        found = dict.fromkeys(
            chosen.of(name) for names in _schemes(num_layers) if _matches(chosen, names) for name in names
        )
        if found:
            return list(found)
    every = [table for table in chosen.tables if "*" in table.layers]
    some = [table for table in chosen.tables if table not in every]
    return [tuple(every), *(tuple(table for table in chosen.tables if table in every or table is one) for one in some)]


def unmatched(chosen: Choice, num_layers: int) -> list[tuple[Table, str]]:
    """The patterns, each with its table, that match no layer of that many under any scheme of names."""
    return [
        (table, pattern) for table in chosen.tables for pattern in table.layers if not _any_matches(pattern, num_layers)
    ]


def _any_matches(pattern: str, num_layers: int) -> bool:
    return any(fnmatchcase(name, pattern) for names in _schemes(num_layers) for name in names)


def _schemes(num_layers: int) -> list[list[str]]:
    return [
        [f"{layers}.{index}.{attention}" for index in range(num_layers)]
        for layers, attention in product(_LAYERS, _ATTENTION)
    ]


def _matches(chosen: Choice, names: list[str]) -> bool:
    try:
        chosen.check_names(names)
    except ValueError:
        return False
    return True
