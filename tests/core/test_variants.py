"""The catalogue and its compositions against the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attnloom import Attention, variants
from attnloom.core.masks import pack_masks
from attnloom.core.variant import Param, Variant
from tests.core import kernels
from tests.core.problem import Problem, make_problem
from tests.core.running import check
from tests.core.variant_cases import ALIBI, ALL_OF_THE_CATALOGUE, SOFT_CAP, STATEFUL, Case
from tests.oracle import Array, At, Band, Hooks

QO_LENS, KV_LENS = [1, 12, 40, 2], [300, 12, 170, 64]


def _problem(readable: Band = Band(None, None)) -> Problem:
    return make_problem(QO_LENS, KV_LENS, num_qo_heads=6, num_kv_heads=2, readable=readable, seed=12)


def _masks(problem: Problem, begins: list[int], seed: int = 0) -> list[torch.Tensor]:
    """A random mask per request over its keys from `begin`; some rows see none of them."""
    g = torch.Generator().manual_seed(seed)
    masks = []
    for n, length, begin in zip(problem.qo_lens, problem.kv_lens, begins, strict=True):
        mask = torch.rand(n, length - begin, generator=g) < 0.6
        mask[::3] = False
        masks.append(mask)
    return masks


def _seen(masks: list[torch.Tensor], begins: list[int]) -> object:
    def seen(at: At) -> Array:
        assert at.q_index is not None and at.kv_index is not None
        begin, mask = begins[at.request], masks[at.request].numpy()
        n, length = at.q_index.size, at.kv_index.size
        result = np.ones((n, length), dtype=bool)
        result[:, begin:] = mask
        return result

    return seen


@pytest.mark.parametrize("num_workers", [1, 7])
@pytest.mark.parametrize("case", [SOFT_CAP, ALIBI, STATEFUL], ids=["soft_cap", "alibi", "sinks"])
def test_catalogue(case: Case, num_workers: int) -> None:
    problem = _problem()
    answer = problem.answer(case.band, case.hooks)
    check(
        kernels.engine_of(case.variant), problem, answer, num_workers=num_workers, params=case.params, slope=case.slope
    )


@pytest.mark.parametrize(
    ("variant", "band"),
    [
        (variants.Causal(), Band(None, 0)),
        (variants.Full(), Band(None, None)),
        (variants.SlidingWindow(33), Band(32, 0)),
        (variants.SlidingWindow(1), Band(0, 0)),
        (variants.SlidingWindow(33, symmetric=True), Band(32, 32)),
        (variants.Causal() & variants.SlidingWindow(20, symmetric=True), Band(19, 0)),
        (variants.SlidingWindow(50) & variants.SlidingWindow(20), Band(19, 0)),
        (variants.Full() & variants.Causal(), Band(None, 0)),
    ],
    ids=str,
)
def test_bands(variant: Variant, band: Band) -> None:
    """A window counts keys, the query's own included; bands of composed variants intersect."""
    problem = _problem(band)
    check(kernels.engine_of(variant), problem, problem.answer(band), num_workers=7)


@pytest.mark.parametrize("begins", [[0, 0, 0, 0], [290, 5, 131, 64]], ids=["whole", "tail"])
@pytest.mark.parametrize("num_workers", [1, 7])
def test_packed_mask(begins: list[int], num_workers: int) -> None:
    problem = _problem()
    masks = _masks(problem, begins)
    hooks = Hooks(logits_mask=_seen(masks, begins))  # type: ignore[arg-type]
    answer = problem.answer(Band(None, None), hooks)
    engine = kernels.engine_of(variants.PackedMask())
    check(engine, problem, answer, num_workers=num_workers, params=pack_masks(masks, begins))


@pytest.mark.parametrize("num_workers", [1, 7, 40])
def test_everything_composed(num_workers: int) -> None:
    """The whole catalogue in one variant: logits hooks chain in order, masks and bands meet."""
    problem, begins = _problem(), [250, 0, 131, 10]
    masks = _masks(problem, begins, seed=1)
    cap, alibi, sinks = SOFT_CAP.hooks.logits_transform, ALIBI.hooks.logits_transform, STATEFUL.hooks.sink
    assert cap is not None and alibi is not None
    hooks = Hooks(
        logits_transform=lambda logits, at: alibi(cap(logits, at), at),
        logits_mask=_seen(masks, begins),  # type: ignore[arg-type]
        sink=sinks,
    )
    params = {**SOFT_CAP.params, **ALIBI.params, **STATEFUL.params, **pack_masks(masks, begins)}
    engine = kernels.engine_of(ALL_OF_THE_CATALOGUE)
    check(engine, problem, problem.answer(Band(89, 0), hooks), num_workers=num_workers, params=params)


def test_order_of_composition_matters_where_hooks_do_not_commute() -> None:
    one, other = variants.SoftCap() & variants.ALiBi(), variants.ALiBi() & variants.SoftCap()
    assert one.logits_transform == other.logits_transform[::-1] != other.logits_transform


def test_parameters_may_be_strided_views() -> None:
    problem = _problem()
    wide = torch.full((6, 3), float("nan"))
    wide[:, 1] = ALIBI.params["alibi_slopes"]
    answer = problem.answer(ALIBI.band, ALIBI.hooks)
    check(kernels.engine_of(ALIBI.variant), problem, answer, num_workers=7, params={"alibi_slopes": wide[:, 1]})


def test_variants_that_differ_in_their_band_share_a_kernel() -> None:
    specs = {kernels.engine_of(v).spec for v in (variants.Causal(), variants.Full(), variants.SlidingWindow(9))}
    assert len(specs) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Variant("not a name"), "not a name"),
        (lambda: Variant("x", left=-1), "left=-1"),
        (lambda: Variant("x", (Param("p"), Param("p"))), "distinct"),
        (lambda: Param("1p"), "1p"),
        (lambda: Param("p", torch.float64), "float64"),
        (lambda: Param("p", shape=("nonsense",)), "nonsense"),
        (lambda: Variant("x", sink="return 0.0f;", use_softmax=False), "sink"),
        (lambda: variants.Sinks() & variants.Sinks(), "sink"),
        (lambda: variants.Sinks() & Variant("y", use_softmax=False), "sink"),
        (lambda: Variant("x", (Param("p"),)) & Variant("y", (Param("p", torch.int64),)), "'p'"),
        (lambda: variants.SlidingWindow(0), "window=0"),
    ],
)
def test_bad_variants_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_captured_parameters_need_not_be_given() -> None:
    """A variant may bring its tensors along; what run() is given goes first."""
    problem = _problem()
    slopes = ALIBI.params["alibi_slopes"]
    capturing = dataclasses.replace(ALIBI.variant, captures={"alibi_slopes": slopes})
    engine = Attention(6, 2, 64, dtype=torch.float32, variant=capturing)
    assert engine.spec == kernels.engine_of(ALIBI.variant).spec
    answer = problem.answer(ALIBI.band, ALIBI.hooks)
    check(engine, problem, answer, num_workers=7)
    flat = torch.zeros(6)
    check(engine, problem, problem.answer(), num_workers=7, params={"alibi_slopes": flat})
    with pytest.raises(ValueError, match="captures"):
        dataclasses.replace(ALIBI.variant, captures={"other": slopes})
