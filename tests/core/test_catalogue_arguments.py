"""Arguments, parameters and compositions that entries of the catalogue refuse, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnloom import Attention, CompositionError, Param, Variant, variants
from attnloom.core.params import check_captures, ordered
from tests.core.catalogue_cases import CAUSAL, DIM, shared_problem


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: variants.Sigmoid() & variants.Sinks(), "joins the softmax's sum, and sigmoid uses none"),
        (lambda: variants.Sinks() & variants.Sigmoid(), "joins the softmax's sum"),
        (lambda: variants.Sigmoid() & variants.ALiBi(), "write alibi & sigmoid"),
        (lambda: CAUSAL & variants.Sigmoid() & variants.SoftCap(), "write soft_cap & causal_sigmoid"),
        (lambda: variants.Sigmoid() & variants.Sigmoid(), "sigmoid"),
        (lambda: variants.Sinks() & variants.Sinks(), "both have a sink"),
        (
            lambda: (
                variants.ALiBi()
                & Variant("other", (Param("alibi_slopes", shape=(None,)),), logits_mask="return false;")
            ),
            "declared as",
        ),
    ],
)
def test_compositions_without_meaning_say_why(make: Callable[[], Variant], says: str) -> None:
    with pytest.raises(CompositionError, match=says) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def _select(pages: list[list[int]]) -> object:
    return variants.select_pages(shared_problem().layout, torch.tensor(pages), torch.tensor([1, 1, 1, 1, 0]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: variants.ChunkedLocal(0), "chunk=0"),
        (lambda: variants.ChunkedLocal(2**30 + 1), "chunk=1073741825: expected at most"),
        (lambda: variants.StreamingLLM(4, 0), "window=0"),
        (lambda: variants.SoftCap(0), "cap=0: expected a finite float32 above 0"),
        (lambda: variants.SoftCap(-5.0), "cap=-5.0: expected a finite float32 above 0"),
        (lambda: variants.SoftCap(float("inf")), "cap=inf: "),
        (lambda: variants.SoftCap(float("nan")), "cap=nan: "),
        (lambda: variants.SoftCap(1e39), "cap=1e"),
        (lambda: variants.GrokTemperature(1), "length=1: expected at least 2"),
        (lambda: variants.Sigmoid(float("nan")), "bias=nan: expected a finite number"),
        (lambda: variants.RoPE(64, 0.0), "base=0.0: expected a finite float32 above 0"),
        (lambda: variants.RoPE(64, -1), "base=-1: "),
        (
            lambda: variants.RoPE(64, scaling={"rope_type": "linear", "factor": float("inf")}),
            r"scaling\['factor'\]=inf",
        ),
        (lambda: variants.RoPE(63), "rotary_dim=63"),
        (lambda: variants.RoPE(64, scaling={"rope_type": "yarn", "factor": 2.0}), "linear or llama3"),
        (lambda: variants.RoPE(64, scaling={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor"),
        (lambda: variants.documents([[3, 0]]), "lengths"),
        (lambda: variants.streaming(shared_problem().layout, [1], 4, 8), "qo_lens"),
        (lambda: _select([[0], [0], [10], [0], [0]]), r"pages\[0\]: expected the row's last page, 18"),
        (lambda: _select([[99], [0], [10], [0], [0]]), "expected 0 to 18"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: variants.SoftCap([1]), r"cap=\[1\]: expected a number"),  # type: ignore[arg-type]
        (lambda: variants.RoPE("x"), "rotary_dim='x': expected an int"),  # type: ignore[arg-type]
        (lambda: variants.RoPE(64, "x"), "base='x': expected a number"),  # type: ignore[arg-type]
        (lambda: variants.RoPE(64, scaling=3), "scaling=3: expected a mapping"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make()


@pytest.mark.parametrize(
    ("variant", "params", "says"),
    [
        (variants.SoftCap(), {"logit_cap": 0.0}, r"params\['logit_cap'\]=0.0: expected a finite number above 0"),
        (
            variants.SoftCap(),
            {"logit_cap": float("inf")},
            r"params\['logit_cap'\]=inf: expected a finite number above 0",
        ),
        (variants.GrokTemperature(), {"temperature_len": 1}, r"params\['temperature_len'\]=1: expected .* above 1"),
        (variants.ChunkedLocal(64), {"chunk_size": 0}, r"params\['chunk_size'\]=0: expected 64, which the variant"),
        (variants.ChunkedLocal(64), {"chunk_size": 128}, r"params\['chunk_size'\]=128: expected 64, which the variant"),
    ],
)
def test_values_that_an_entry_cannot_take_are_refused(variant: Variant, params: dict[str, float], says: str) -> None:
    declared = variant.params
    with pytest.raises(ValueError, match=says):
        ordered(declared, variant.captures, params, {})
    good = {"logit_cap": 5.0, "temperature_len": 9, "chunk_size": 64}
    names = [param.name for param in declared]
    assert ordered(declared, variant.captures, {name: good[name] for name in names}, {}) == [good[n] for n in names]


def test_more_rotated_dimensions_than_a_head_has() -> None:
    variant = CAUSAL & variants.RoPE(2 * DIM)
    with pytest.raises(
        ValueError, match=rf"rope_frequencies.*shape=\({DIM},\): expected at most {DIM // 2} .*head_dim/2"
    ):
        Attention(4, 2, DIM, dtype=torch.float32, variant=variant)
    check_captures(variants.RoPE(DIM).params, variants.RoPE(DIM).captures, {"head_dim": DIM})
