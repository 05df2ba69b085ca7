"""`attnloom plan`: its numbers, against sums that are made here in another way."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnloom.core.cli.balance import balance
from attnloom.core.cli.lengths import Lengths, given, trace
from attnloom.core.cli.pattern import pattern
from attnloom.core.cli.picture import palette
from attnloom.core.cli.plan import _plan
from attnloom.core.plan import Plan
from attnloom.core.planner import plan_scan
from attnloom.core.tiles import CPU
from tests.core.cli.helpers import DATA, attnloom
from tests.core.planning import indptr

TILE_Q, TILE_KV, COSTS = CPU.tiles.tile_q, CPU.tiles.tile_kv, CPU.tiles.costs
STEPS = {
    "decode": given([4096, 128, 1, 700], [1]),
    "prefill and decode": given([500, 3000, 64], [500, 1, 1]),
    "append": given([500, 90], [100, 7]),
    "nothing to see": given([0, 10], [1]),
    "prefixes": trace(DATA / "mooncake_conversation.jsonl", 6, 0, 0, 2),
}


def planned(step: Lengths, workers: int = 7, window: int | None = None, full: bool = False) -> Plan:
    return _plan(step, 8, 2, window, full, workers)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", STEPS)
def test_the_numbers_add_up(name: str, window: int | None) -> None:
    step = STEPS[name]
    plan = planned(step, window=window)
    found = balance(plan, step.kv, head_dim=64, element_bytes=2)
    pieces = [each for worker in found.workers for each in worker]
    rows = plan.tile_rows.tolist()
    assert sum(each.piece.kv_end - each.piece.kv_begin for each in pieces) == found.kv_tiles
    for each in pieces:
        tiles = each.piece.kv_end - each.piece.kv_begin
        beside = COSTS.item + COSTS.item_row * rows[each.piece.tile]
        assert each.cost == beside + tiles * (COSTS.kv_tile + COSTS.row * rows[each.piece.tile])
        assert each.request == int(plan.tile_request[each.piece.tile])
    # Each item is whole on one worker, or in parts that meet.
    items: dict[tuple[int, int], list[Any]] = {}
    for each in pieces:
        items.setdefault((each.piece.tile, each.piece.head), []).append(each)
    assert len(items) == found.items == plan.num_tiles * 2
    split = {item: parts for item, parts in items.items() if len(parts) > 1}
    assert len(split) == found.splits
    assert sum(len(parts) for parts in split.values()) == found.partials == sum(not each.whole for each in pieces)
    assert found.makespan == max(sum(each.cost for each in worker) for worker in found.workers)
    assert found.mean == pytest.approx(sum(each.cost for each in pieces) / 7)
    assert found.imbalance >= 1 or not found.makespan
    # No schedule ends before the mean, and Algorithm 1's pieces cost no less in all than the unsplit items.
    assert found.algorithm1 * 7 >= sum(each.cost for parts in items.values() if len(parts) == 1 for each in parts)
    assert found.kv_bytes == sum(step.kv) * 2 * 2 * 64 * 2
    assert found.read_bytes == found.kv_tiles * TILE_KV * 2 * 64 * 2
    assert found.row_bytes == sum(step.q) * 8 * 2 * 64 * 2
    assert found.partial_bytes == sum(2 * rows[each.piece.tile] * 65 * 4 for each in pieces if not each.whole)


def test_json_holds_the_numbers() -> None:
    ran = attnloom("plan", "--kv", "4096,128", "--q", 1, "--heads", 8, "--kv-heads", 2, "--workers", 3, "--json")
    assert ran.status == 0, ran.err
    table = ran.json
    # 4096 / 64 + 128 / 64 tiles, for two kv heads.
    assert table["kv_tiles"] == 2 * (64 + 2) == sum(table["worker_kv_tiles"])
    assert (table["requests"], table["queries"], table["kv_tokens"], table["workers"]) == (2, 2, 4224, 3)
    assert table["makespan"] == max(table["worker_cost"])
    assert table["bytes"]["kv_stored"] == 4224 * 2 * 2 * 128 * 2
    assert table["worker_requests"][0] == [0] and table["worker_requests"][-1] == [0, 1]
    assert table["balance"] == pytest.approx(table["makespan"] / table["mean_cost"])


def test_the_table_says_the_same() -> None:
    arguments = ("plan", "--zipf", "--batch", 40, "--mean", 2000, "--workers", 40, "--seed", 3)
    table = attnloom(*arguments, "--json").json
    shown = attnloom(*arguments).out
    assert f"the busiest has {table['balance']:.3f} x the mean" in shown
    assert f"{table['makespan'] / 1e3:,.1f} µs" in shown
    assert f"{table['algorithm1']['makespan'] / 1e3:,.1f} µs" in shown
    assert "40 requests (Zipf, mean 2000, seed 3), 40 queries" in shown
    assert shown.count("█") > 32 * 20 and "... and 8 workers more" in shown


def test_a_window_bounds_what_is_read_and_full_sees_all() -> None:
    arguments = ("plan", "--kv", 6400, "--q", 640, "--heads", 4, "--kv-heads", 4, "--workers", 2, "--json")
    windowed = attnloom(*arguments, "--window", 64).json["kv_tiles"]
    causal = attnloom(*arguments).json["kv_tiles"]
    full = attnloom(*arguments, "--full").json["kv_tiles"]
    tiles = -(-640 // TILE_Q)
    assert full == 4 * tiles * 100
    assert windowed <= 4 * tiles * (-(-(TILE_Q + 64) // TILE_KV) + 1) < causal < full


def test_workers_come_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_WORKERS", "5")
    assert attnloom("plan", "--kv", 100, "--json").json["workers"] == 5
    monkeypatch.delenv("ATTNLOOM_WORKERS")
    assert attnloom("plan", "--kv", 100, "--json").json["workers"] == torch.get_num_threads()


@pytest.mark.parametrize("name", ["azure_conv.csv", "mooncake_conversation.jsonl"])
def test_a_trace(name: str) -> None:
    ran = attnloom("plan", "--trace", DATA / name, "--batch", 8, "--skip", 3, "--prefill", 1, "--workers", 9, "--json")
    assert ran.status == 0, ran.err
    expected = trace(DATA / name, 8, 3, 0, 1)
    assert (ran.json["queries"], ran.json["kv_tokens"]) == (sum(expected.q), sum(expected.kv))
    assert ran.json["source"] == expected.source and ran.json["source"].startswith(f"{name}, requests 3 to 10")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("", 2, "expected one of --kv, --zipf, --uniform, --trace; got none"),
        ("--kv 1 --zipf", 2, "got --kv and --zipf"),
        ("--kv many", 2, "--kv many: expected numbers with commas"),
        ("--kv 1,2 --q 1,2,3", 1, "--q has 3 lengths"),
        ("--zipf --q 1,2", 2, "expected one length"),
        ("--kv 1 --dtype int8", 2, "expected one of bf16, fp16, fp32"),
        ("--kv 1 --full --window 3", 2, "exclude each other"),
        ("--kv 1 --heads 7", 2, "expected a multiple of --kv-heads 8"),
        ("--kv 1 --workers 0", 2, "--workers"),
        ("--kv -1", 1, "kv=-1: expected 0"),
        ("--kv 1073741823 --q 1073741823", 1, "expected at most"),
        ("--trace /no/such/file", 1, "/no/such/file"),
        ("--kv 1 --plot plan.gif", 1, "ends in one of .png"),
    ],
)
def test_bad_arguments(arguments: str, status: int, message: str) -> None:
    ran = attnloom("plan", *arguments.split())
    assert ran.status == status
    # The box around a usage error breaks lines.
    assert message in " ".join(ran.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("name", "window", "dealt"),
    [*itertools.product(STEPS, (None, 1, 70), (False,)), ("prefill and decode", None, True), ("append", 70, True)],
)
def test_the_pattern_is_what_the_queries_see(name: str, window: int | None, dealt: bool) -> None:
    """Element by element, against masks over (query, key) of each request; by request, in whatever order tiles lie."""
    step = STEPS[name]
    plan = planned(step, window=window)
    if dealt:
        key = plan.key._replace(tile_q_short=16, tile_q=128)
        plan = plan_scan(indptr(step.q), torch.tensor(step.kv, dtype=torch.int32), key, num_workers=3, costs=COSTS)
        assert plan.tile_row.tolist() != sorted(plan.tile_row.tolist()), "tiles lie in the order of the requests"
    stretches, columns = pattern(step, plan)
    assert all(each.begin >= 0 and each.begin + each.width <= columns and each.width > 0 for each in stretches)
    group = 4
    for tile, (request, first, rows) in enumerate(
        sorted(zip(plan.tile_request.tolist(), plan.tile_row.tolist(), plan.tile_rows.tolist(), strict=True))
    ):
        q, kv = step.q[request], step.kv[request]
        queries = torch.arange(first, first + rows) // group + kv - q
        keys = torch.arange(kv)
        seen = keys[None] <= queries[:, None]
        if window is not None:
            seen &= keys[None] > queries[:, None] - window
        mine = [each for each in stretches if each.row == tile]
        assert sum(each.width for each in mine) == int(seen.any(0).sum())
        assert {each.request for each in mine} <= {request}
    slots: dict[int, int] = {}
    for names in step.prefixes:
        for name_ in names:
            slots[name_] = slots.get(name_, 0) + 1
    assert columns == sum(step.kv) - 512 * sum(number - 1 for number in slots.values())
    if name == "prefixes":
        assert sum(each.shared for each in stretches) > 0


def test_neighbouring_requests_have_other_colours() -> None:
    colors = palette(500)
    assert len(set(colors)) == 500
    assert all(0 <= part <= 1 for color in colors for part in color)
    for first, second in itertools.pairwise(colors):
        assert sum(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.2


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'attnloom[plot]'")
    file = tmp_path / f"plan.{ending}"
    trace_file = DATA / "mooncake_conversation.jsonl"
    ran = attnloom("plan", "--trace", trace_file, "--batch", 6, "--prefill", 1, "--workers", 9, "--plot", file)
    assert ran.status == 0, ran.err
    assert f"drawn in {file}" in ran.out
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert file.read_bytes().startswith(begins[ending]) and file.stat().st_size > 10_000


def test_the_bars_of_a_picture_are_the_plan() -> None:
    """The boxes as they are drawn, read back: each worker's are as long as its cost, in the colours of its requests."""
    pytest.importorskip("matplotlib", reason="pip install 'attnloom[plot]'")
    from matplotlib import pyplot

    from attnloom.core.cli.picture import _draw_bars

    step = STEPS["decode"]
    plan = planned(step)
    numbers = balance(plan, step.kv, head_dim=64, element_bytes=2)
    colors = palette(len(step.kv))
    figure, axes = pyplot.subplots()
    _draw_bars(axes, numbers, colors)
    boxes = [path.get_extents() for path in axes.collections[0].get_paths()]
    faces = [tuple(face[:3]) for face in axes.collections[0].get_facecolors()]
    for worker, cost in enumerate(numbers.costs):
        mine = [index for index, box in enumerate(boxes) if box.y0 < worker < box.y1]
        assert sum(boxes[index].width for index in mine) == pytest.approx(cost / 1e3)
        requests = {each.request for each in numbers.workers[worker]}
        drawn = {tuple(round(float(part), 6) for part in faces[index]) for index in mine}
        assert drawn == {tuple(round(part, 6) for part in colors[request]) for request in requests}
    lines = sorted(line.get_xdata()[0] for line in axes.lines)
    assert lines == pytest.approx(sorted([numbers.mean / 1e3, numbers.algorithm1 / 1e3]))
    pyplot.close(figure)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = attnloom("plan", "--kv", 100, "--json", "--plot", tmp_path / "plan.png")
    assert ran.status == 1
    assert "--plot needs matplotlib, which is not installed: pip install 'attnloom[plot]'" in ran.err
    assert json.loads(ran.out)["kv_tokens"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv", 9, "--workers", 3_000_000_000), "--workers 3000000000: expected at most 1048576"),
        (("--zipf", "--mean", 10**400), "--mean 10"),
        (("--zipf", "--batch", 10**12), "--batch 1000000000000: expected fewer than 2"),
        (("--kv", 9, "--head-dim", 10**400), "OverflowError: "),
    ],
)
def test_numbers_that_are_too_large_are_one_line(arguments: tuple[object, ...], message: str) -> None:
    ran = attnloom("plan", *arguments)
    assert ran.status == 1
    assert ran.err.startswith(f"attnloom: {message}") and ran.err.count("\n") == 1
