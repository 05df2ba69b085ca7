"""What stands for a GPU here: a module that keeps what it is launched with, an engine that counts its checks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnloom import BlockSparseLayout
from attnloom.core.abi import AttentionParams
from attnloom.core.block_mask import BlockMask
from attnloom.core.direct import DirectPath
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.tiles import Costs

DEVICE = torch.device("cpu", 0)
SCALES = (0.5, 2.0, 3.0)


class Kernel:
    """Stands for a loaded module: keeps a copy of what it is launched with."""

    def __init__(self, error: int = 0) -> None:
        self.launched: list[AttentionParams] = []
        self.error = error

    def __getitem__(self, name: str) -> Callable[[Any], int]:
        assert name == "attnloom_run"
        return self.run

    def run(self, argument: Any) -> int:
        self.launched.append(AttentionParams.from_buffer_copy(argument._obj))
        return self.error


class Engine:
    """Stands for an engine: counts how often it is asked to check."""

    def __init__(self) -> None:
        self.checks = 0

    def check_run(self) -> None:
        self.checks += 1

    def check_plan(self, plan: Plan) -> None:
        assert isinstance(plan, Plan)

    def scales(self, *given: Any) -> tuple[float, ...]:
        return tuple(1.0 if scale is None else float(scale) for scale in given)


class Memory:
    """Stands for the device module: memory of the host."""

    blocks: ClassVar[dict[int, Any]] = {}

    def attnloom_allocate(self, num_bytes: int) -> int:
        block = (ctypes.c_char * num_bytes)(*[1] * min(num_bytes, 64))
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def attnloom_release(self, address: int) -> int:
        del self.blocks[address]
        return 0

    def attnloom_zero(self, address: int, num_bytes: int, stream: int) -> int:
        ctypes.memset(address, 0, num_bytes)
        return 0

    def attnloom_capture(self, stream: int) -> int:
        return 1


def step(rows: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(rows, 5, 80)[:, 1:, :64]
    cache = torch.randn(7, 2, 16, 2, 64)
    return q, cache[:, 0], cache[:, 1], torch.empty(rows, 4, 64)


def plan_of(
    rows: int = 3,
    *,
    block_kinds: Tensor | None = None,
    positions: bool = False,
    num_workers: int = 9,
    lockstep: int = 1,
) -> Plan:
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    layout = BlockSparseLayout.from_page_table(table, torch.tensor([1, 2, 3], dtype=torch.int32), 16)
    if positions:
        layout = replace(layout, positions=layout.indices, index_stride=3)
    key = PlanKey(4, 2, 16, 32, 64, None, 0, DEVICE)
    mask = None if block_kinds is None else BlockMask(block_kinds, 64)
    buffer = torch.zeros(40, dtype=torch.int32)
    return Plan(key, 3, 3, num_workers, lockstep, rows, 3, Costs(1, 0, 1, 1), buffer, layout, mask)


def launch(
    path: DirectPath,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: Plan,
    engine: Engine | None = None,
    *,
    given: tuple[object, object, object] = SCALES,
    flags: tuple[bool, bool] = (False, False),
    lse: Tensor | None = None,
    hooks: int = 0,
) -> None:
    q, k, v, out = tensors
    path.run(engine or Engine(), plan, q, k, v, given, flags, out, lse, hooks)  # type: ignore[arg-type]
