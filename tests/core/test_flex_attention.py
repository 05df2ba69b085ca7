"""Hooks written for FlexAttention give what torch.nn.attention.flex_attention gives, under plans that split rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import attnloom
from attnloom.core.attention import Attention
from attnloom.core.jit import build
from attnloom.core.kernels import attention_spec
from attnloom.core.variant import Variant
from tests.core.flex_mods import BATCH, HEAD_DIM, LENGTH, MASK_MODS, NUM_KV_HEADS, NUM_QO_HEADS, SCORE_MODS
from tests.core.problem import Problem, make_problem

CASES = [*SCORE_MODS, *MASK_MODS]
BOTH = ("relative table, a module", "documents")


@cache
def _variants() -> dict[str, Variant]:
    traced = {name: attnloom.score_mod(mod) for name, mod in SCORE_MODS.items()}
    traced |= {name: attnloom.mask_mod(mod) for name, mod in MASK_MODS.items()}
    traced[" & ".join(BOTH)] = traced[BOTH[0]] & traced[BOTH[1]]
    build([attention_spec("cpu", torch.float32, HEAD_DIM, HEAD_DIM, variant) for variant in traced.values()])
    return traced


@cache
def _problem() -> Problem:
    return make_problem(
        [LENGTH] * BATCH,
        [LENGTH] * BATCH,
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        table="scattered",
        seed=21,
    )


def _flex(problem: Problem, dtype: torch.dtype, score_mod: Any, mask_mod: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(out [B, S, Hq, D], lse [B, S, Hq]) of torch's flex_attention, run as it is and not compiled."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    dense = problem.dense()
    q, k, v = (torch.stack([getattr(r, x) for r in dense]).transpose(1, 2).to(dtype) for x in ("q", "k", "v"))
    mask = None
    if mask_mod is not None:
        mask = torch_flex.create_block_mask(mask_mod, BATCH, NUM_QO_HEADS, LENGTH, LENGTH, device="cpu")
    with torch.no_grad():
        wanted = torch_flex.AuxRequest(lse=True)
        out, aux = torch_flex.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True, return_aux=wanted
        )
    return out.transpose(1, 2).double(), aux.lse.transpose(1, 2).double()


def _attnloom(problem: Problem, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    engine = Attention(NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float32, variant=variant)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=7)
    assert plan.num_splits > 1
    out, lse = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, return_lse=True)
    return out.view(BATCH, LENGTH, NUM_QO_HEADS, HEAD_DIM), lse.view(BATCH, LENGTH, NUM_QO_HEADS)


def _check(name: str, score_mod: Any, mask_mod: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem()
    out, lse = _attnloom(problem, _variants()[name])
    wanted, wanted_lse = _flex(problem, dtype, score_mod, mask_mod, monkeypatch)
    plain, _ = _flex(problem, dtype, None, None, monkeypatch)
    assert (plain - wanted).abs().max() > 0.05, "the mod changes nothing: the test could not fail"
    # Outputs are means of values of size 1; each logit errs by some 1e-6 in both.
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-5)
    seen = torch.isfinite(lse)
    assert torch.equal(seen, torch.isfinite(wanted_lse))
    assert (out[~seen] == 0).all()
    torch.testing.assert_close(lse[seen].double(), wanted_lse[seen], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_flex_attention(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(name, SCORE_MODS.get(name), MASK_MODS.get(name), dtype, monkeypatch)


def test_score_mod_and_mask_mod_together(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(" & ".join(BOTH), SCORE_MODS[BOTH[0]], MASK_MODS[BOTH[1]], torch.float64, monkeypatch)


def test_there_are_fifteen_of_them() -> None:
    assert len(CASES) >= 15
