"""Tensors that a traced hook captures: their names, the parameters they become, and those that cannot be read."""

from __future__ import annotations

import functools
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
