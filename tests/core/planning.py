"""Calls the planner on plain lists, with tiles small enough that few tokens make many of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from attnloom.core.plan import Plan, PlanKey
from attnloom.core.planner import plan_scan
from attnloom.core.tiles import Costs
from tests.core import planner_oracle
from tests.core.strategies import PlanCase

TILE_Q_SHORT, TILE_Q, TILE_KV = 16, 32, 64
COSTS = planner_oracle.Costs(item=20, item_row=2, kv_tile=50, row=3)


def indptr(lens: Sequence[int]) -> torch.Tensor:
    """int32 [R + 1] from lengths."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def key_of(
    num_qo_heads: int,
    num_kv_heads: int,
    *,
    left: int | None = None,
    right: int | None = 0,
    tiles: tuple[int, int, int] = (TILE_Q_SHORT, TILE_Q, TILE_KV),
    chunk: int = 0,
    device: str = "cpu",
) -> PlanKey:
    return PlanKey(num_qo_heads, num_kv_heads, *tiles, left, right, torch.device(device), chunk=chunk)


def scan(case: PlanCase, costs: planner_oracle.Costs = COSTS, key: PlanKey | None = None, tile_q: int = TILE_Q) -> Plan:
    """The engine's plan of a case. key: another than of the tiles here on a CPU; tile_q: another tall one."""
    heads = case.num_kv_heads
    if key is None:
        tiles = (TILE_Q_SHORT, tile_q, TILE_KV)
        key = key_of(case.group * heads, heads, left=case.left, right=case.right, tiles=tiles, chunk=case.chunk)
    return plan_scan(
        indptr(case.qo_lens),
        torch.tensor(case.kv_lens, dtype=torch.int32),
        key,
        num_workers=case.num_workers,
        lockstep=case.lockstep,
        costs=Costs(costs.item, costs.item_row, costs.kv_tile, costs.row),
    )
