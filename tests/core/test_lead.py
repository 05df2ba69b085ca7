"""Which plans of an engine on a GPU give the workers of the first half more (Tiles.lead). No GPU is needed."""

from __future__ import annotations

import pytest
import torch

from attnloom import Attention, BlockSparseLayout, variants
from attnloom.core import devices, engine_plan
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.plan_input import PlanInput
from attnloom.core.tiles import CPU, SM80, Tiles
from tests.core.planning import indptr

CUDA = torch.device("cuda", 0)


def engine_of(tiles: Tiles = SM80.tiles, ctas: int = 2, *, batch_invariant: bool = False) -> Attention:
    """As far as it is needed to plan: an engine on a GPU of 132 multiprocessors, each with so many tall CTAs."""
    engine = object.__new__(Attention)
    engine.device = CUDA
    engine.variant = variants.Causal()
    engine.num_kv_heads = 8
    engine.tiles = tiles
    engine.plan_key = PlanKey(32, 8, tiles.tile_q_short, tiles.tile_q, tiles.tile_kv, None, 0, CUDA)
    engine.batch_invariant = batch_invariant
    engine.validate = False
    engine._ctas_per_sm = {tiles.tile_q_short: 3, tiles.tile_q: ctas}
    return engine


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[PlanInput]:
    """What the planners are given, which are not run."""
    found: list[PlanInput] = []

    def plan_step(given: PlanInput, *, total_q: int | None, into: Plan | None, validate: bool) -> PlanInput:
        found.append(given)
        return given

    monkeypatch.setattr(engine_plan, "plan_step", plan_step)
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(BlockSparseLayout, "device", CUDA)
    monkeypatch.delenv("ATTNLOOM_WORKERS", raising=False)
    return found


def plan(engine: Attention, queries: int, num_workers: int | None = None) -> None:
    lengths = torch.full((3,), 900, dtype=torch.int32)
    layout = BlockSparseLayout.from_page_table(torch.zeros(3, 57, dtype=torch.int32), lengths, 16)
    engine.plan(indptr([queries] * 3), layout, kv_lens=lengths, num_workers=num_workers)


def test_tall_tiles_on_shared_multiprocessors(given: list[PlanInput]) -> None:
    plan(engine_of(), 900)
    plan(engine_of(SM80.tiles_for(256), 3), 900)
    assert [(each.lead, each.num_workers) for each in given] == [(24, 264), (24, 392)]
    assert SM80.tiles.lead == SM80.tiles_for(256).lead == 24 and CPU.tiles.lead == 0


def test_none_for_decode(given: list[PlanInput]) -> None:
    plan(engine_of(), 1)
    assert [(each.lead, each.num_workers) for each in given] == [(0, 392)]


def test_none_where_no_other_cta_is_older(given: list[PlanInput]) -> None:
    plan(engine_of(ctas=1), 900)
    assert [(each.lead, each.num_workers) for each in given] == [(0, 132)]


def test_none_in_the_batch_invariant_mode(given: list[PlanInput]) -> None:
    plan(engine_of(batch_invariant=True), 900)
    assert [each.lead for each in given] == [0]


def test_none_where_others_chose_the_workers(given: list[PlanInput], monkeypatch: pytest.MonkeyPatch) -> None:
    plan(engine_of(), 900, num_workers=264)
    monkeypatch.setenv("ATTNLOOM_WORKERS", "264")
    plan(engine_of(), 900)
    assert [(each.lead, each.num_workers) for each in given] == [(0, 264), (0, 264)]
