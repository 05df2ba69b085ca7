"""Which variants the layers of a served model compute beside their own: tables, each for some of the layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from attnloom.core.hook_text import code_of
from attnloom.core.variant import HOOKS, Variant

EVERY_LAYER = ("*",)

# What a step decides and no configuration knows: the place of a request in the batch, of a query in its chunk.
_OF_A_STEP = ("request", "q_index")
_OF_A_RANK = ("q_head", "kv_head")


@dataclass(frozen=True)
class Table:
    """One ``[[variant]]`` of a file, or the one variant that an option names.

    Attributes:
        place: where it stands, for errors: ``serve.toml: variant 1``.
        variant: what it adds to a layer, with the values of its parameters.
        layers: patterns of the names of layers.
        replace: the layer's own soft cap, ALiBi and sinks are left out.
    """

    place: str
    variant: Variant
    layers: tuple[str, ...] = EVERY_LAYER
    replace: bool = False

    def __post_init__(self) -> None:
        used = reads(self.variant, _OF_A_STEP)
        used = used or next((param.name for param in self.variant.params if "num_requests" in str(param.shape)), "")
        if used:
            raise ValueError(
                f"{self.place}: {self.variant.name} reads {used}, which differs from step to step in a server: "
                "expected positions and heads"
            )

    def names(self, layer: str) -> bool:
        """Whether it acts on this layer."""
        return any(fnmatchcase(layer, pattern) for pattern in self.layers)


@dataclass(frozen=True)
class Choice:
    """Every table of a configuration, in order; none, where nothing was asked for."""

    tables: tuple[Table, ...] = ()

    @property
    def by_layer(self) -> bool:
        """Whether layers differ: then one cannot be made before its name is known."""
        return any("*" not in table.layers for table in self.tables)

    def of(self, layer: str) -> tuple[Table, ...]:
        """What acts on a layer, in order."""
        return tuple(table for table in self.tables if table.names(layer))

    def check_names(self, layers: Iterable[str]) -> None:
        """A pattern that matches none of a model's layers is a ValueError: a typing error would go unnoticed."""
        known = list(layers)
        for table in self.tables:
            for pattern in table.layers:
                if not any(fnmatchcase(layer, pattern) for layer in known):
                    raise ValueError(f"{table.place}: layers: {pattern!r} matches none of {known}")

    def check_one_rank(self) -> None:
        """What reads heads is a ValueError: a rank of several has some of the heads and counts them from 0."""
        for table in self.tables:
            if used := reads(table.variant, _OF_A_RANK):
                raise ValueError(
                    f"{table.place}: {table.variant.name} reads {used}, which is not supported under tensor "
                    "parallelism yet: each rank counts its own heads from 0"
                )


def reads(variant: Variant, names: tuple[str, ...]) -> str:
    """The first of ``names`` that a hook of the variant reads, or ""."""
    for text in (text for hook in HOOKS for text in variant.texts(hook)):
        code = code_of(text)
        for name in names:
            if re.search(rf"\b{name}\b", code):
                return name
    return ""


def layer_variant(visibility: Variant, score: Variant | None, tables: tuple[Table, ...]) -> Variant:
    """What a layer computes: which keys it sees, what it does to scores itself, and what the tables add.

    Args:
        visibility: causality and window of the layer. No table takes them away: a framework frees what they hide.
        score: its soft cap, ALiBi and sinks.
        tables: what acts on it; one that replaces leaves ``score`` out.

    Raises:
        ValueError: two of them have no composition; the message names the table.
    """
    variant = visibility
    if score is not None and not any(table.replace for table in tables):
        variant = variant & score
    for table in tables:
        try:
            variant = variant & table.variant
        except ValueError as error:
            raise ValueError(f'{table.place}: {error}; or mode = "replace"') from error
    return variant
