"""Which tables of a configuration meet in one layer, as a build ahead of time foresees it."""

from __future__ import annotations

import pytest

from attnloom.core.cli.layers import combinations
from attnloom.core.serving import EVERY_LAYER, Choice, Table
from attnloom.core.variants import Causal

Layers = dict[str, tuple[str, ...]]


def chosen(layers: Layers) -> Choice:
    return Choice(tuple(Table(place, Causal(), patterns) for place, patterns in layers.items()))


def met(layers: Layers, num_layers: int | None) -> set[str]:
    """The combinations, each as the places of its tables."""
    found = combinations(chosen(layers), num_layers)
    assert len(found) == len({tuple(table.place for table in tables) for tables in found}), "one twice"
    return {"".join(table.place for table in tables) for tables in found}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({}, {""}),
        ({"a": EVERY_LAYER}, {"a"}),
        ({"a": ("*.layers.1.*",)}, {"", "a"}),
        ({"a": ("*.layers.1.*", "*.layers.2.*"), "b": ("*.layers.2.*",)}, {"", "a", "ab"}),
        ({"a": ("*.layers.?.*",), "b": ("*.layers.1*",)}, {"a", "b", "ab"}),
        ({"a": ("*.layers.?.*",), "b": ("*.layers.1*",), "c": EVERY_LAYER}, {"ac", "bc", "abc"}),
        ({"a": ("model.layers.*",), "b": ("*.[0-5].*",), "c": ("*.[4-9].*",)}, {"a", "ab", "abc", "ac"}),
        ({"a": ("language_model.*.0.*",), "b": ("*.self_attn.attn",)}, {"b", "ab"}),
        ({"a": ("transformer.h.3.attn.attn",), "b": ("*.h.*",)}, {"b", "ab"}),
    ],
)
def test_tables_that_meet(layers: Layers, expected: set[str]) -> None:
    """Twelve layers, named as the patterns say."""
    assert met(layers, 12) == expected


def test_a_scheme_of_names_that_a_pattern_rules_out_adds_nothing() -> None:
    """Were layers named as GPT-2's, no layer would have both."""
    assert met({"a": ("*.layers.*",), "b": ("*.11.*",)}, 12) == {"a", "ab"}


@pytest.mark.parametrize("pattern", ["*.layers.12.*", "transformer.h.999.*", "*.1[2-9].self_attn.attn"])
def test_a_pattern_for_a_deeper_model(pattern: str) -> None:
    assert met({"a": (pattern.replace("12", "11").replace("999", "11").replace("1[2", "1[1"),)}, 12) == {"", "a"}
    with pytest.raises(ValueError) as raised:
        combinations(chosen({"here": ("*.0.*", pattern)}), 12)
    assert str(raised.value) == f"here: layers: {pattern!r} matches no layer of this model, which has 12"


def test_more_layers_than_any_model_has() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers=1000000000: expected at most 1000"):
        combinations(chosen({"a": ("*.layers.1.*",)}), 10**9)


@pytest.mark.parametrize("num_layers", [None, 12])
def test_unknown_names_are_guessed(num_layers: int | None) -> None:
    layers = {"a": ("tower.0.*",), "b": ("tower.*",), "c": EVERY_LAYER}
    assert met(layers, num_layers) == {"c", "ac", "bc"}
