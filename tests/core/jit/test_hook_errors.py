"""A compile error in a user's hook is reported at the user's variant, hook and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnloom.core.errors import CompileFailed
from attnloom.core.jit import load
from attnloom.core.kernels import attention_spec
from attnloom.core.variant import Variant
from attnloom.core.variants import Causal, SoftCap

# A hook, its text, and the line of the text that is wrong.
WRONG = {
    "a name that is not there": ("logits_transform", "float scaled = logits * 2.0f;\nreturn scaled + no_such_name;", 2),
    "a semicolon that is missing": ("logits_mask", "const int distance = q_pos - kv_pos\nreturn distance < 4;", 2),
    "a type that does not fit": ("query_transform", "\n\nreturn query;", 3),
    "a parameter that is not declared": ("output_transform", "return output[dim] * params.gain;", 1),
}


@pytest.mark.parametrize("how", WRONG)
def test_the_diagnostic_names_the_variant_the_hook_and_the_line(cache: Path, how: str) -> None:
    hook, text, line = WRONG[how]
    variant = Causal() & SoftCap() & Variant("my_variant", **{hook: text})
    with pytest.raises(CompileFailed) as caught:
        load(attention_spec("cpu", torch.float32, 64, 64, variant))
    error = caught.value
    assert "error:" in error.diagnostic
    # A missing semicolon is reported where the statement ends: on the line before.
    places = [f"my_variant.{hook}:{at}:" for at in (line, line - 1)]
    assert any(place in error.diagnostic and place in str(error) for place in places), error


def test_lines_after_a_hook_are_not_counted_as_the_hooks(cache: Path) -> None:
    """A sound hook of several lines before the wrong one does not shift it, nor does it take the blame."""
    sound = Variant("sound", logits_transform="float twice = logits * 2.0f;\n\n\nreturn twice;")
    wrong = Variant("wrong", logits_mask="return true;\n;\nreturn nothing_of_the_kind;")
    with pytest.raises(CompileFailed) as caught:
        load(attention_spec("cpu", torch.float32, 64, 64, sound & wrong))
    assert "wrong.logits_mask:3:" in caught.value.diagnostic
    assert caught.value.log is not None and "sound.logits_transform" not in caught.value.log.read_text()
