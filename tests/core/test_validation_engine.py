"""Arguments that no engine takes: the error names the argument and its value, and comes before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom import Attention
from attnloom.core.variant import Variant

GOOD: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_qo_heads": 5}, ValueError, r"num_qo_heads=5: .*num_kv_heads=2"),
        ({"num_qo_heads": 0}, ValueError, r"num_qo_heads=0"),
        ({"num_kv_heads": -2}, ValueError, r"num_kv_heads=-2"),
        ({"num_qo_heads": 258}, ValueError, r"num_qo_heads=258: .*128"),
        ({"num_qo_heads": 4.0}, TypeError, r"num_qo_heads=4\.0"),
        ({"num_kv_heads": True}, TypeError, r"num_kv_heads=True"),
        ({"head_dim": 72}, ValueError, r"head_dim=72: .*64, 80, 96, 112, 128, 192, 256"),
        ({"head_dim": 0}, ValueError, r"head_dim=0"),
        ({"head_dim_v": 128}, ValueError, r"head_dim_v=128"),
        ({"dtype": torch.float64}, ValueError, r"dtype=torch\.float64: .*float32"),
        ({"dtype": torch.int8}, ValueError, r"dtype=torch\.int8"),
        ({"kv_dtype": torch.bfloat16}, ValueError, r"kv_dtype=torch\.bfloat16"),
        ({"variant": "causal"}, TypeError, r"variant='causal'"),
        ({"device": "meta"}, ValueError, r"device=meta: .*cpu"),
    ],
)
def test_bad_argument(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Attention(**{**GOOD, **change})


def test_dtype_is_required() -> None:
    with pytest.raises(TypeError, match="dtype"):
        Attention(4, 2, 64)  # type: ignore[call-arg]


def test_a_hook_that_does_not_compile_is_one_typed_error() -> None:
    from attnloom import CompileFailed

    broken = Variant("test_broken", logits_transform="return no_such_name;")
    with pytest.raises(CompileFailed, match="no_such_name"):
        Attention(**GOOD, variant=broken)


@pytest.mark.parametrize("family", ["sm90", "nonsense"])
def test_a_family_that_does_not_serve_the_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_FAMILY", family)
    with pytest.raises(ValueError, match=f"ATTNLOOM_FAMILY='{family}'"):
        Attention(**GOOD)
