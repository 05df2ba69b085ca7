"""What the builder keeps for captured graphs, without a GPU: which buffers plans go into, where layouts point."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from attnloom.adapters.page_table import paged_layout
from attnloom.backends.vllm.device_steps import DeviceSteps

CPU = torch.device("cpu")


class Engine:
    """Gives out plans, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def plan(self, indptr: torch.Tensor, layout: Any, **asked: Any) -> object:
        self.asked.append({"indptr": indptr, "layout": layout, **asked})
        return object()


def common(requests: int, tokens: int, causal: bool = True) -> Any:
    return SimpleNamespace(
        num_actual_tokens=tokens,
        num_reqs=requests,
        max_query_len=tokens - requests + 1,
        causal=causal,
        query_start_loc=torch.arange(9, dtype=torch.int32),
        seq_lens=torch.ones(8, dtype=torch.int32),
    )


def test_layouts_point_into_the_block_table_and_their_starts_stay() -> None:
    steps = DeviceSteps(16, CPU)
    table = torch.arange(600, dtype=torch.int32).view(20, 30)
    lengths = torch.full((20,), 5, dtype=torch.int32)
    first, second = steps.layout(table[:7], lengths[:7]), steps.layout(table[:3], lengths[:3])
    expected = paged_layout(table, lengths[:7], 16)
    assert torch.equal(first.starts, expected.starts) and torch.equal(first.indices, expected.indices)
    assert first.indices.data_ptr() == table.data_ptr()
    assert first.starts.data_ptr() == second.starts.data_ptr()
    assert steps.layout(table[:0], lengths[:0]).num_rows == 0
    assert steps.layout(table[:1], lengths[:1]).indices.shape == (30,)


def test_steps_of_a_captured_shape_are_planned_into_its_first_plan() -> None:
    steps, engine = DeviceSteps(16, CPU), Engine()
    impl: Any = SimpleNamespace(engines={True: engine, False: engine}, params=dict)

    def plan(requests: int, tokens: int, capture: bool, key: str = "a", causal: bool = True) -> Any:
        return steps.plan(impl, key, common(requests, tokens, causal), None, None, capture)  # type: ignore[arg-type]

    captured = plan(4, 4, capture=True)
    plan(4, 4, capture=True)
    plan(4, 4, capture=False)
    for other in (plan(4, 5, False), plan(3, 4, False), plan(4, 4, False, "b"), plan(4, 4, False, causal=False)):
        assert other is not captured
    assert [asked["into"] for asked in engine.asked] == [None, captured, captured, None, None, None, None]
    assert [asked["max_q"] for asked in engine.asked] == [1, 1, 1, 2, 2, 1, 1]
    assert engine.asked[0]["total_q"] == 4 and engine.asked[0]["indptr"].shape == (5,)
