"""What steps on a GPU are made from, and when plans are made, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from attnloom.adapters.page_table import paged_layout
from attnloom.backends.vllm import device_steps
from attnloom.backends.vllm.device_steps import DeviceStep, RowStarts
from attnloom.backends.vllm.step_plans import StepPlans

CPU = torch.device("cpu")


class Engine:
    """Gives out plans, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def plan(self, indptr: torch.Tensor, layout: Any, **asked: Any) -> object:
        self.asked.append({"indptr": indptr, "layout": layout, **asked})
        return object()


class Layer:
    def __init__(self, name: str) -> None:
        self.engines = {True: Engine(), False: Engine()}
        self.name = name

    def plan_id(self, causal: bool) -> tuple[str, bool]:
        return self.name, causal

    def params(self) -> dict[str, Any]:
        return {"of": self.name}


def common(requests: int, tokens: int, table: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(
        num_actual_tokens=tokens,
        num_reqs=requests,
        max_query_len=tokens - requests + 1,
        query_start_loc=torch.arange(9, dtype=torch.int32),
        seq_lens=torch.ones(24, dtype=torch.int32),
        block_table_tensor=torch.arange(600, dtype=torch.int32).view(20, 30) if table is None else table,
    )


def test_layouts_point_into_the_block_table_and_their_starts_stay() -> None:
    starts = RowStarts(CPU)

    def layout(requests: int) -> Any:
        return DeviceStep.of(step, starts, 16, in_pages=True).layout

    step = common(7, 7)
    first = layout(7)
    expected = paged_layout(step.block_table_tensor, step.seq_lens[:7], 16)
    assert torch.equal(first.starts, expected.starts) and torch.equal(first.indices, expected.indices)
    assert torch.equal(first.lengths, expected.lengths)
    assert first.indices.data_ptr() == step.block_table_tensor.data_ptr()
    step.num_reqs = 3
    assert layout(3).starts.data_ptr() == first.starts.data_ptr()
    step.num_reqs = 0
    assert layout(0).num_rows == 0
    step.num_reqs = 1
    assert layout(1).indices.shape == (30,)
    step.num_reqs, kept = 1000, starts.of(256, 30)
    assert starts.of(1000, 30).shape == (1000,) and starts.of(1000, 30).data_ptr() != kept.data_ptr()
    assert torch.equal(starts.of(1000, 30)[:256], kept), "what graphs read that were captured before"
    assert starts.of(5, 31).tolist() == [0, 31, 62, 93, 124]


@pytest.mark.parametrize("view", [lambda table: table[:, ::2], lambda table: table.t()], ids=["gaps", "columns"])
def test_tables_whose_ids_have_others_between_them_are_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    table = view(torch.arange(400, dtype=torch.int32).view(20, 20))
    step = DeviceStep.of(common(5, 5, table), RowStarts(CPU), 16, in_pages=True)
    with pytest.raises(ValueError, match=r"block_table\.stride\(\).*: expected ids of a row to be contiguous"):
        _ = step.layout


def test_starts_that_a_graph_fills_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = RowStarts(CPU)
    monkeypatch.setattr(device_steps, "_in_graph", lambda device: True)
    captured = starts.of(3, 10)
    monkeypatch.undo()
    kept = starts.of(3, 10)
    assert captured.tolist() == kept.tolist() == [0, 10, 20] and captured.data_ptr() != kept.data_ptr()
    assert starts.of(2, 10).data_ptr() == kept.data_ptr()


def test_without_pages_keys_lie_as_queries() -> None:
    step = DeviceStep.of(common(3, 3), RowStarts(CPU), 16, in_pages=False)
    assert step.layout.block_size == 1 and step.layout.starts.tolist() == [0, 1, 2]


def test_a_step_is_what_it_was_when_it_was_built() -> None:
    given, layer = common(4, 6), Layer("a")
    step = DeviceStep.of(given, RowStarts(CPU), 16, in_pages=True)
    given.num_reqs, given.num_actual_tokens, given.seq_lens = 2, 2, None  # as drafters do
    for causal in (True, False):
        step.plan(layer, causal, None)  # type: ignore[arg-type]
    (asked,) = layer.engines[True].asked
    assert asked["total_q"] == 6 and asked["max_q"] == 3 and asked["indptr"].shape == (5,)
    assert asked["layout"].num_rows == 4 and asked["params"] == {"of": "a"} and asked["block_mask"] is None
    (other,) = layer.engines[False].asked
    assert other["layout"] is asked["layout"]
    step.most = 0
    step.plan(layer, True, None)  # type: ignore[arg-type]
    assert layer.engines[True].asked[1]["max_q"] is None, "unknown"


def test_a_plan_is_made_by_the_first_layer_of_every_pass() -> None:
    made: list[tuple[str, tuple[str, bool]]] = []

    def make(layer: Any, key: Any) -> Any:
        made.append((layer.name, key))
        return object()

    plans: Any = StepPlans(make, causal=False)
    first, second, other = Layer("a"), Layer("a"), Layer("b")
    assert made == [], "nothing before a layer asks"
    plan = plans.of(first)
    assert plans.of(second) is plan and plans.of(other) is not plan
    assert made == [("a", ("a", False)), ("b", ("b", False))]
    again = plans.of(second)  # whichever comes first now: a warm-up may have been the pass before, and this a capture
    assert again is not plan and plans.of(first) is again
    assert plans.of(other) is not plan and len(made) == 4
