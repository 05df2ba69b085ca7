"""What constructors of variants and parameters refuse, and what a composition says that has no meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom import CompositionError, Param, Variant, variants
from attnloom.core.params import ordered, pack
from attnloom.core.serving import reads

BY_X = "return logits * params.x;"

NO_NAMES = [
    *("thread_local", "char16_t", "char32_t", "co_await", "float", "HookParams", "uint64_t", "int32_t", "NULL"),
    *("__COUNTER__", "__x", "_Bool", "M_PI", "INT_MAX", "FLT_MAX", "INFINITY", "ATTNLOOM_HD", "assert", "3x", ""),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_no_kernel_can_declare_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"Param\.name="):
        Param(name)


def test_names_near_them_are_names() -> None:
    for name in ("null", "float_", "M", "int_max", "MAX", "a__b", "_x", "sizes"):
        assert Param(name).name == name


@pytest.mark.parametrize("shape", [(-1,), (2.5,), (True,), ("heads",), (">=heads",), ("head_dim", -2)])
def test_sizes_are_ints_or_names(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"Param\.shape=.* of x: expected sizes"):
        Param("x", shape=shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": "x"}, r"Variant\.params='x' of a: expected a tuple of Param"),
        ({"params": Param("x")}, r"Variant\.params=Param\(.* of a: expected a tuple of Param"),
        ({"params": ("x",)}, r"Variant\.params=\('x',\) of a: expected a tuple of Param"),
        ({"use_softmax": "no"}, r"Variant\.use_softmax='no' of a: expected a bool"),
        ({"params": (Param("x"),), "captures": {"x": "str"}}, r"Variant\.captures\['x'\]='str' of a"),
        ({"params": (Param("x"),), "captures": {"x": True}}, r"Variant\.captures\['x'\]=True of a"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Variant("a", **arguments)


def test_a_shape_and_a_name_have_their_types() -> None:
    with pytest.raises(TypeError, match=r"Param\.shape=4 of x: expected a tuple"):
        Param("x", shape=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Param\.name=3"):
        Param(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Variant\.name=None"):
        Variant(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", ["left", "right"])
def test_a_band_wider_than_positions_is_unlimited(bound: str) -> None:
    for reach in (2**31 - 1, 2**31, 2**32, 2**40, 2**70):
        assert getattr(Variant("a", **{bound: reach}), bound) is None  # type: ignore[arg-type]
    assert getattr(Variant("a", **{bound: 2**31 - 2}), bound) == 2**31 - 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"Variant\.{bound}=True"):
        Variant("a", **{bound: True})  # type: ignore[arg-type]


def test_a_window_wider_than_positions_is_causal() -> None:
    assert (variants.SlidingWindow(2**32 + 1).left, variants.SlidingWindow(2**32 + 1).right) == (None, 0)


@pytest.mark.parametrize(
    "use",
    ["params.x", "params . x", "params\n  .x", "params./* its */x", "params // of b\n.x", "(params).x", "p.x", "P(x)"],
)
def test_a_value_of_ones_own_is_renamed_however_it_is_written(use: str) -> None:
    """Or refused, where a use may hide."""
    before = {"p.x": "const auto& p = params;\n", "P(x)": "#define P(name) params.name\n"}.get(use, "")
    one = Variant("one", (Param("x"),), logits_transform=BY_X, captures={"x": 2.0})
    other = Variant("other", (Param("x"),), logits_transform=f"{before}return logits * {use};", captures={"x": 0.5})
    if before or use == "(params).x":
        with pytest.raises(CompositionError, match=r"'x' of other .* cannot be renamed in logits_transform"):
            one & other
    else:
        both = one & other
        assert "x_2" in both.texts("logits_transform")[1] and not both.texts("logits_transform")[1].endswith("x;")
        assert both.captures == {"x": 2.0, "x_2": 0.5}


def test_two_that_make_weights_are_told_so() -> None:
    weights = Variant("weights", use_softmax=False, logits_transform="return sigmoid(logits);")
    with pytest.raises(CompositionError, match="both make weights of the logits, expected one"):
        weights & weights
    with pytest.raises(CompositionError, match="write soft_cap & weights"):
        weights & variants.SoftCap(3.0)


def test_a_comment_reads_nothing() -> None:
    spoken = "// no q_index\nreturn /* of the\n request */ kv_pos % 3 > 0;"
    mask = Variant("request", logits_mask=spoken)
    assert mask.masks_by_position and reads(mask, ("request", "q_index")) == ""
    told = Variant("told", logits_mask='#line 7 "q_index.toml"\nreturn kv_pos > q_index;')
    assert not told.masks_by_position and reads(told, ("request", "q_index")) == "q_index"


@pytest.mark.parametrize("value", [2**63, 2**70, -(2**63) - 1])
def test_an_int_beyond_64_bits_is_refused_by_name(value: int) -> None:
    with pytest.raises(ValueError, match=r"params\['n'\]=.*64 bits"):
        _ordered(Param("n", torch.int64), value)


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400])
def test_a_number_beyond_float32_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=r"params\['x'\]=.*float32"):
        _ordered(Param("x"), value)


def test_the_ends_of_numbers_are_taken() -> None:
    assert _ordered(Param("n", torch.int64), 2**63 - 1) == [2**63 - 1]
    assert _ordered(Param("x"), 2**127) == [2.0**127]
    assert _ordered(Param("x"), -float("inf")) == [-float("inf")]


def test_a_tensor_with_the_negative_bit_is_refused_by_name() -> None:
    """Its memory holds the numbers with the other sign."""
    table = torch.ones(5, dtype=torch.complex64).conj().imag
    assert table.is_neg()
    with pytest.raises(ValueError, match=r"params\['t'\]\.is_neg\(\)=True: expected .*resolve_neg"):
        _ordered(Param("t", shape=(None,)), table)
    _ordered(Param("t", shape=(None,)), table.resolve_neg())
    with pytest.raises(ValueError, match=r"params\['t'\]\.is_neg\(\)"):  # what a compiled graph hands over
        pack([Param("t", shape=(None,))], [table])


def _ordered(param: Param, value: Any) -> list[Any]:
    return list(ordered([param], {}, {param.name: value}, {}))
