"""The tracer as text: what it writes, what it calls captured tensors, what it refuses. Nothing is compiled."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnloom
from attnloom import Param, TraceError, Variant
from attnloom.core.kernels import attention_spec
from attnloom.core.params import ordered

SLOPES = torch.arange(1.0, 7.0)
TABLE = torch.zeros(6, 9)
CLASS = torch.zeros(4, dtype=torch.int64)


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


def test_captured_tensors_become_parameters() -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    number = torch.tensor(2.0)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, scales: torch.Tensor = SLOPES) -> Any:
        return score * number + TABLE[h, kv_idx - q_idx] * half[b] + scales[kv_idx % 6]

    variant = attnloom.score_mod(mod)
    assert variant.params == (
        Param("number", shape=(1,)),
        Param("TABLE", shape=(">=num_qo_heads", None)),
        Param("half", shape=(">=num_requests",)),
        Param("scales", shape=(None,)),
    )
    assert variant.captures["half"].dtype == torch.float32  # type: ignore[union-attr]
    number.fill_(5.0)
    TABLE[0, 0] = 4.0
    assert float(variant.captures["number"]) == 5.0, "a captured tensor is not copied"
    assert variant.captures["TABLE"].data_ptr() == TABLE.data_ptr()  # type: ignore[union-attr]


def test_names_of_captured_tensors() -> None:
    class Holder:
        def __init__(self) -> None:
            self.weights = {"bias": torch.ones(4)}
            self.parts = [torch.ones(4), torch.zeros(4)]

        def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score + self.weights["bias"][b] + self.parts[1][b] + CLASS[b] + (SLOPES * 2)[h] + SLOPES[:3][b]

    names = [param.name for param in attnloom.score_mod(Holder()).params]
    assert names == ["weights_bias", "parts_1", "CLASS", "captured", "SLOPES"]

    def wants(score: Any, b: Any, h: Any, q: Any, k: Any, table: torch.Tensor, *, double: torch.Tensor) -> Any:
        return score + table[b] + double[b]

    partial = functools.partial(wants, double=torch.ones(3), table=torch.zeros(3))
    assert [param.name for param in attnloom.score_mod(partial).params] == ["table", "double_"]


def test_integers_of_few_bits_lie_in_32_and_are_brought_back_into_range() -> None:
    tiny = torch.zeros(4, dtype=torch.int8)
    variant = attnloom.score_mod(lambda s, b, h, q, k: s + (tiny[k & 3] + 1))
    assert variant.params == (Param("tiny", torch.int32, (None,)),)
    assert variant.texts("logits_transform")[0].split("\n")[1:4] == [
        "const int32_t t1 = params.tiny.at(t0);",
        "const int32_t t2 = int32_t((t1 & 255) ^ 128) - 128;",
        "const int32_t t3 = t2 + 1;",
    ]


def test_a_capture_can_be_replaced_at_run_time_and_is_checked() -> None:
    variant = attnloom.score_mod(lambda s, b, h, q, k: s + SLOPES[h])
    sizes = {"num_qo_heads": 6}
    (value,) = ordered(variant.params, variant.captures, None, sizes)
    assert isinstance(value, torch.Tensor) and value.data_ptr() == SLOPES.data_ptr()
    ordered(variant.params, variant.captures, {"SLOPES": torch.zeros(9)}, sizes)
    with pytest.raises(ValueError, match="at least 6"):
        ordered(variant.params, variant.captures, {"SLOPES": torch.zeros(5)}, sizes)


def test_variants_that_differ_in_captured_values_share_a_kernel() -> None:
    def make(bias: torch.Tensor) -> Variant:
        return attnloom.score_mod(lambda s, b, h, q, k: s + bias[h], "bias")

    zeros = torch.zeros(6)
    one, other = make(zeros), make(torch.ones(8))
    assert one == make(zeros) and one != other, "which values they bring along is part of what they are"
    specs = [attention_spec("cpu", torch.float32, 64, 64, variant) for variant in (one, other)]
    assert specs[0] == specs[1]


def test_composed_variants_keep_their_captures_apart() -> None:
    def make(bias: torch.Tensor) -> Variant:
        return attnloom.score_mod(lambda s, b, h, q, k: s + bias[h], "bias")

    zeros, ones = torch.zeros(6), torch.ones(6)
    both = make(zeros) & make(ones)
    assert [param.name for param in both.params] == ["bias", "bias_2"]
    assert both.captures["bias"].data_ptr() == zeros.data_ptr()  # type: ignore[union-attr]
    assert both.captures["bias_2"].data_ptr() == ones.data_ptr()  # type: ignore[union-attr]
    assert "params.bias_2[q_head]" in both.texts("logits_transform")[1]
    three = both & make(torch.zeros(6))
    assert [param.name for param in three.params] == ["bias", "bias_2", "bias_3"]
    same = make(zeros) & make(zeros)
    assert [param.name for param in same.params] == ["bias"]
    declared = Variant(
        "declared", (Param("bias", shape=(6,)),), logits_transform="return logits + params.bias[q_head];"
    )
    for mixed in (declared & make(zeros), make(zeros) & declared):
        assert set(mixed.captures) == {"bias_2"}, "what run() is given must not go to a captured tensor"


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


def _branch(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx > kv_idx:  # HERE
        return score
    return score * 2


def _and(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    near = q_idx > kv_idx and kv_idx > 3  # HERE
    return torch.where(near, score, 0)


def _not(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(not (q_idx == kv_idx), score, 0)  # noqa: SIM201  HERE


def _chained(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(3 < q_idx < 7, score, 0)  # HERE


def _builtin(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return max(score, 0)  # HERE


def _among(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (h in (1, 2))  # HERE


def _item(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + q_idx.item()  # HERE


def _python_math(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return math.tanh(score)  # HERE


def _list(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + [1.0, 2.0][h]  # HERE


def _loop(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for _ in range(q_idx):  # HERE
        score = score + 1
    return score


def _unknown(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    helper = torch.lgamma(  # HERE
        score
    )
    return helper


def _method(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.cumsum(0)  # HERE


def _in_place(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.add_(1)  # HERE


def _indices(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h, q_idx]  # HERE


def _whole(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES  # HERE


def _half_indexed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    row = TABLE[h]
    return score + row  # HERE


def _slice(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, :].sum()  # HERE


def _outside(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, 9]  # HERE


def _float_index(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[q_idx / 2]  # HERE


def _zero(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + q_idx // 0  # HERE


def _bool_minus(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (1 - (q_idx > 3)) - ((q_idx > 3) - (q_idx > 4))  # HERE


def _complex(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.zeros(3, dtype=torch.complex64)[h]  # HERE


def _iterated(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return sum(SLOPES[h], score) + sum(score)  # HERE


def _numpy_like(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + "1"  # HERE


UNTRANSLATABLE = [
    (_branch, r"torch\.where"),
    (_and, r"\(a\) & \(b\)"),
    (_not, "~x"),
    (_chained, r"\(a < b\) & \(b < c\)"),
    (_builtin, r"torch\.maximum"),
    (_among, r"\(x == a\) \| \(x == b\)"),
    (_item, "Python number"),
    (_python_math, "torch's functions instead of math's"),
    (_list, r"torch\.tensor\(list\)"),
    (_loop, "Python number"),
    (_unknown, "lgamma has no translation"),
    (_method, "cumsum has no translation"),
    (_in_place, "add_ has no translation"),
    (_indices, "too many indices for SLOPES"),
    (_whole, r"SLOPES, a tensor of shape \(6,\)"),
    (_half_indexed, "TABLE with 1 of 2 dimensions"),
    (_slice, "every dimension takes one number"),
    (_outside, "index 9 is out of range for dimension 1 of TABLE, which has size 9"),
    (_float_index, "no integer"),
    (_zero, "division by zero"),
    (_bool_minus, "bools cannot be subtracted"),
    (_complex, "complex64"),
    (_iterated, "iterated"),
    (_numpy_like, "type str"),
]


@pytest.mark.parametrize(("function", "says"), UNTRANSLATABLE, ids=lambda value: getattr(value, "__name__", ""))
def test_what_has_no_translation_is_shown(function: Callable[..., Any], says: str) -> None:
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, text in enumerate(lines) if "HERE" in text)
    with pytest.raises(TypeError, match=says) as caught:
        attnloom.score_mod(function)
    error = caught.value
    assert isinstance(error, TraceError) and isinstance(error, attnloom.AttnloomError)
    assert (error.file, error.line) == (__file__, line)
    assert f"{__file__}:{line}" in str(error) and "HERE" in error.source and error.source in str(error)
    assert "\n  Write " in str(error)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(3)


UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "FakeTensor": _fake,
    "meta": lambda: torch.zeros(3, device="meta"),
    r"torch\.sparse_coo": lambda: torch.ones(3).to_sparse(),
    r"torch\.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "nested ": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    r"quantised tensor \(torch\.qint8\)": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")  # torch warns that it is about to drop some of these
@pytest.mark.parametrize("kind", UNREADABLE)
def test_captures_without_elements_in_memory_are_refused(kind: str) -> None:
    strange = UNREADABLE[kind]()
    with pytest.raises(TraceError, match=f"strange is a.*{kind.strip()}") as caught:
        attnloom.score_mod(lambda score, b, h, q, k: score + strange[k])
    assert caught.value.file == __file__ and "strange[k]" in caught.value.source


def test_a_captured_view_with_its_sign_to_turn_is_read_turned() -> None:
    parts = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    variant = attnloom.score_mod(lambda score, b, h, q, k: score + parts[k])
    value = variant.captures["parts"]
    assert isinstance(value, torch.Tensor) and not value.is_neg() and value.tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: attnloom.score_mod(lambda score, q_idx: score), "FlexAttention's 5 arguments"),
        (lambda: attnloom.mask_mod(lambda score, b, h, q, k: True), "FlexAttention's 4 arguments"),
        (lambda: Variant("x", query_transform=lambda query, dimension: query[dimension]), "dimension"),
        (lambda: Variant("x", key_transform=lambda key, dim, q_pos: key[dim]), "q_pos"),
        (lambda: attnloom.mask_mod(lambda b, h, q, k: q - k), "returns a value of torch.int64"),
        (lambda: attnloom.score_mod(lambda score, b, h, q, k: None), "returns None"),
        (lambda: attnloom.score_mod(lambda score, b, h, q, k: SLOPES), "returns tensor"),
        (lambda: Variant("x", logits_transform=lambda logits, params: logits * params.cap), "params has no 'cap'"),
        (lambda: Variant("x", query_transform=lambda query, dim: query[dim / 2]), "query is indexed by"),
        (lambda: Variant("x", query_transform=lambda query, dim: query), "returns"),
    ],
)
def test_functions_that_do_not_fit(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        make()
    assert caught.value.file == __file__ and caught.value.line > 0


def test_errors_of_the_function_itself_pass_through() -> None:
    def broken(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        attnloom.score_mod(broken)


def test_names_of_variants() -> None:
    def my_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * 2

    assert attnloom.score_mod(my_mod).name == "my_mod"
    assert attnloom.score_mod(lambda s, b, h, q, k: s * 2).name == "score_mod"
    assert attnloom.mask_mod(lambda b, h, q, k: q > k).name == "mask_mod"
    assert attnloom.mask_mod(lambda b, h, q, k: q > k, "mine").name == "mine"


def test_keywords_of_cpp_are_no_names() -> None:
    with pytest.raises(ValueError, match="keyword"):
        Param("class")


@pytest.mark.parametrize("given", [3, ("return logits;", 3), None])
def test_hooks_that_are_neither_text_nor_function(given: Any) -> None:
    with pytest.raises(TypeError, match=r"Variant\.logits_transform=.*expected C\+\+ text or a Python function"):
        Variant("x", logits_transform=given)


def test_ranges_are_text() -> None:
    with pytest.raises(TypeError, match=r"Variant\.visible=.*expected C\+\+ text$"):
        Variant("x", visible=lambda kv_len: kv_len)
