"""The tracer as text: what it writes, and what costs nothing. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnloom
from attnloom import Param, Variant
from attnloom.core.kernels import attention_spec

SLOPES = torch.arange(1.0, 7.0)


def _text(function: Callable[..., Any]) -> list[str]:
    (text,) = attnloom.score_mod(function).texts("logits_transform")
    return text.split("\n")


def test_the_text_is_one_line_per_operation() -> None:
    cap = 30.0

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bias = SLOPES[h] * (kv_idx - q_idx)
        return torch.where(q_idx % 8 == 0, cap * torch.tanh(score / cap), score + bias)

    assert _text(capped) == [
        "const float t0 = params.SLOPES[q_head];",
        "const int32_t t1 = kv_pos - q_pos;",
        "const float t2 = t0 * float(t1);",
        "const int32_t t3 = q_pos & 7;",
        "const bool t4 = t3 == 0;",
        "const float t5 = logits / 30.0f;",
        "const float t6 = tanh(t5);",
        "const float t7 = 30.0f * t6;",
        "const float t8 = logits + t2;",
        "return t4 ? t7 : t8;",
    ]


def test_what_is_not_used_is_not_written() -> None:
    def wasteful(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        _ = torch.exp(SLOPES[h] * q)
        return score * 2

    variant = attnloom.score_mod(wasteful)
    assert variant.texts("logits_transform") == ("return logits * 2.0f;",)
    assert variant.params == () and variant.captures == {}


def test_integers_are_as_wide_as_they_can_become() -> None:
    text = "\n".join(_text(lambda s, b, h, q, k: s + (q - k) * 3 + (q - k) * 2**20))
    assert "const int32_t t0 = q_pos - kv_pos;" in text
    assert "const int64_t t1 = int64_t(t0) * int64_t(3);" in text
    assert "int64_t" not in "\n".join(_text(lambda s, b, h, q, k: s + (q - k) // 3 % 5 * 7))


@pytest.mark.parametrize(
    ("make", "hook"),
    [
        (lambda: attnloom.score_mod(lambda score, b, h, q_idx, kv_idx: score), "logits_transform"),
        (lambda: attnloom.mask_mod(lambda b, h, q_idx, kv_idx: q_idx.new_ones((), dtype=torch.bool)), "logits_mask"),
        (lambda: attnloom.mask_mod(lambda b, h, q_idx, kv_idx: True), "logits_mask"),
        (lambda: Variant("x", query_transform=lambda query, dim: query[dim]), "query_transform"),
        (lambda: Variant("x", key_transform=lambda dim, key: key[dim]), "key_transform"),
        (lambda: Variant("x", value_transform=lambda value, dim: value[dim]), "value_transform"),
        (lambda: Variant("x", output_transform=lambda output, dim, q_pos: output[dim]), "output_transform"),
        (lambda: Variant("x", logits_transform=lambda logits: logits), "logits_transform"),
        (lambda: Variant("x", logits_transform="return logits;"), "logits_transform"),
        (lambda: Variant("x", logits_mask="  return true;\n"), "logits_mask"),
        (lambda: Variant("x", query_transform="return query[dim];"), "query_transform"),
    ],
)
def test_an_identity_costs_nothing(make: Callable[[], Variant], hook: str) -> None:
    """The kernel is the very one without hooks: same sources, same module."""
    variant = make()
    assert variant.texts(hook) == ()
    plain = attention_spec("cpu", torch.float32, 64, 64, Variant("plain"))
    assert attention_spec("cpu", torch.float32, 64, 64, variant) == plain
    composed = attnloom.variants.SoftCap() & variant
    alone = attention_spec("cpu", torch.float32, 64, 64, attnloom.variants.SoftCap())
    assert attention_spec("cpu", torch.float32, 64, 64, composed) == alone


def test_functions_take_the_names_of_the_dialect() -> None:
    variant = Variant(
        "x",
        (Param("rate"), Param("gain", shape=("num_qo_heads", "head_dim"))),
        query_transform=lambda query, dim, q_pos, q_head, params, head_dim: (
            query[dim ^ 1] * params.rate * q_pos + params.gain[q_head, dim] + head_dim
        ),
        sink=lambda q_head, request: q_head + request,
        logits_mask=lambda q_index, kv_index: q_index > kv_index,
    )
    assert variant.texts("query_transform")[0].split("\n") == [
        "const int32_t t0 = dim ^ 1;",
        "const float t1 = query[inside(t0, head_dim)];",
        "const float t2 = t1 * params.rate;",
        "const float t3 = t2 * float(q_pos);",
        "const float t4 = params.gain.at(q_head, dim);",
        "const float t5 = t3 + t4;",
        "return t5 + float(head_dim);",
    ]
    assert variant.texts("sink") == ("const int32_t t0 = q_head + request;\nreturn float(t0);",)
    assert variant.texts("logits_mask") == ("return q_index > kv_index;",)
    named = Variant("y", logits_transform=lambda logits, kv_pos: logits + kv_pos)
    assert named.texts("logits_transform") == ("return logits + float(kv_pos);",)
    by_position = Variant("z", logits_transform=lambda score, b, h, q, k: score + k)
    assert by_position.texts("logits_transform") == named.texts("logits_transform")


def test_text_of_hooks_says_where_it_comes_from() -> None:
    variant = Variant("mine", logits_transform="return logits + 1.0f;")
    assert variant.texts("logits_transform") == ('#line 1 "mine.logits_transform"\nreturn logits + 1.0f;',)
    placed = Variant("mine", logits_transform='#line 7 "file.toml"\nreturn logits + 1.0f;')
    assert placed.texts("logits_transform") == ('#line 7 "file.toml"\nreturn logits + 1.0f;',)


def test_names_of_variants() -> None:
    def my_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * 2

    assert attnloom.score_mod(my_mod).name == "my_mod"
    assert attnloom.score_mod(lambda s, b, h, q, k: s * 2).name == "score_mod"
    assert attnloom.mask_mod(lambda b, h, q, k: q > k).name == "mask_mod"
    assert attnloom.mask_mod(lambda b, h, q, k: q > k, "mine").name == "mine"
