"""A hook's text as a function: errors at its end name its own line, it has to return, its macros end with it."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from attnloom import Attention, CompileFailed, Variant
from attnloom.core.hook_text import code_of
from attnloom.core.jit.build import build
from attnloom.core.kernels import attention_spec
from tests.core.problem import make_problem
from tests.core.running import check
from tests.oracle import Band

NO_RETURN = [
    ("logits_transform", "logits * 2;", 1),
    ("logits_transform", "logits * 2; // return logits;", 1),
    ("logits_transform", "\nif (kv_pos > 3) return logits;\n", 2),
    ("logits_mask", "kv_pos < 5;", 1),
    ("query_transform", "if (dim > 3) {\n  return query[dim];\n}", 3),
    ("sink", "q_head;", 1),
    ("visible", "if (q_first > 3) return Range{0, kv_len};", 1),
]
NO_END = [
    ("logits_transform", "const float x = 1.0f;\nreturn logits * x", 2),
    ("logits_transform", "return logits * 2.0f // twice\n", 1),
    ("logits_mask", ("return true;", "return kv_pos\n  < 5"), 2),
    ("output_transform", '#line 7 "table.toml"\nreturn output[dim]', 7),
]


def _diagnostic(variant: Variant) -> str:
    with pytest.raises(CompileFailed) as caught:
        Attention(4, 2, 64, dtype=torch.float32, variant=variant)
    return caught.value.diagnostic


@pytest.mark.parametrize(("hook", "text", "line"), NO_RETURN)
def test_a_hook_that_may_return_nothing_is_refused_at_its_line(hook: str, text: str, line: int) -> None:
    said = _diagnostic(Variant("mine", **{hook: text}))  # type: ignore[arg-type]
    assert said.startswith(f"mine.{hook}:{line}:") and "return" in said


@pytest.mark.parametrize(("hook", "text", "line"), NO_END)
def test_a_hook_without_its_last_semicolon_is_refused_at_its_line(
    hook: str, text: str | tuple[str, ...], line: int
) -> None:
    said = _diagnostic(Variant("mine", **{hook: text}))  # type: ignore[arg-type]
    file = "table.toml" if "#line" in text else f"mine.{hook}"
    assert said.startswith(f"{file}:{line}:") and "expected" in said


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc in PATH; it compiles without a GPU")
@pytest.mark.parametrize(("hook", "text", "line"), [NO_RETURN[0], NO_RETURN[2], NO_RETURN[3], NO_END[0]])
def test_nvcc_refuses_them_too(hook: str, text: str, line: int) -> None:
    variant = Variant("mine", **{hook: text})  # type: ignore[arg-type]
    with pytest.raises(CompileFailed) as caught:
        build([attention_spec("sm80", torch.bfloat16, 64, 64, variant, "80")])
    said = caught.value.diagnostic
    assert re.match(rf"mine\.{hook}\({line}\): error: (missing return|expected)", said), said


@pytest.mark.parametrize("text", ["", "  \n", "// return logits;", "/* return logits; */", "// a \\\nreturn logits;"])
def test_a_hook_without_code_is_refused(text: str) -> None:
    for given in (text, ("return logits;", text)):
        with pytest.raises(ValueError, match=r"Variant\.logits_transform of mine: expected C\+\+"):
            Variant("mine", logits_transform=given)


def test_what_a_hook_defines_ends_with_it() -> None:
    """Both scale by their own factor, and a name that the kernel has is its own again after the hook."""
    first = Variant("first", logits_transform="#define SCALE 2.0f\n#define head_dim 7\nreturn logits * SCALE;")
    second = Variant("second", logits_transform="#ifndef SCALE\n#define SCALE 0.5f\n#endif\nreturn logits * SCALE;")
    third = Variant("third", logits_transform="constexpr float SCALE = 1.0f;\nreturn logits * SCALE;")
    problem = make_problem([1, 5], [70, 20])
    engine = Attention(4, 2, 64, dtype=torch.float32, variant=first & second & third)
    check(engine, problem, problem.answer(Band(None, None)))


def test_code_is_what_is_no_comment_string_or_place() -> None:
    text = (
        '#line 3 "request.py"\n#define A q_pos\nreturn f("q_index", \'r\') /* kv_index */ + 1\'000 // request \\\n'
        " request\n + A;"
    )
    assert code_of(text).split() == ["#define", "A", "q_pos", "return", "f(", ",", ")", "+", "1'000", "+", "A;"]
