"""A plan as a picture: one bar per worker, coloured by request, beside the block-sparse pattern of the step."""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnloom.core.cli.balance import Balance
from attnloom.core.cli.lengths import Lengths
from attnloom.core.cli.pattern import pattern

if TYPE_CHECKING:
    from attnloom.core.plan import Plan

Color = tuple[float, float, float]

_ENDINGS = (".png", ".svg", ".pdf")
_INK, _FAINT, _RED = "#2b2b2b", "#8a8a8a", "#c03028"
_NAMED_REQUESTS, _NAMED_WORKERS = 40, 48  # up to so many, there is room for numbers


def draw(step: Lengths, plan: Plan, numbers: Balance, file: Path) -> None:
    """Draw a plan.

    Args:
        step: its lengths.
        plan: what was made of them.
        numbers: of the plan.
        file: PNG, SVG or PDF by its ending.

    Raises:
        ValueError: another ending; matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if file.suffix.lower() not in _ENDINGS:
        raise ValueError(f"--plot {file}: expected a file name that ends in one of {', '.join(_ENDINGS)}")
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'attnloom[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = palette(plan.num_requests)
    height = min(max(4.8, 2.2 + 0.1 * max(plan.num_workers, min(plan.num_requests, 100))), 11.0)
    with pyplot.rc_context({"font.size": 9, "axes.edgecolor": _FAINT, "text.color": _INK, "svg.hashsalt": "attnloom"}):
        figure, (bars, right) = pyplot.subplots(
            1, 2, figsize=(13, height), width_ratios=(1.1, 1), layout="constrained", gridspec_kw={"wspace": 0.04}
        )
        _draw_bars(bars, numbers, colors)
        _draw_pattern(right, step, plan, colors)
        key = plan.key
        figure.suptitle(
            f"{plan.num_requests:,} requests, {plan.total_q:,} queries, {sum(step.kv):,} KV tokens, "
            f"{key.num_qo_heads}/{key.num_kv_heads} heads ({step.source})",
            fontsize=11,
        )
        figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=3, fontsize=9)
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        pyplot.close(figure)


def palette(requests: int) -> list[Color]:
    """A colour per request: hues by the golden ratio, so that neighbours differ, in three depths."""
    depths = ((0.55, 0.85), (0.62, 0.68), (0.38, 0.92))
    return [colorsys.hsv_to_rgb((0.58 + index * 0.618034) % 1, *depths[index % 3]) for index in range(requests)]


def _readable(on: Color) -> str:
    """Ink or white, whichever is read on a colour."""
    return _INK if 0.3 * on[0] + 0.59 * on[1] + 0.11 * on[2] > 0.6 else "white"


def _draw_bars(axes: Any, numbers: Balance, colors: Sequence[Color]) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    longest = max(numbers.makespan, numbers.algorithm1, 1)
    scale, unit = (1e6, "ms") if longest >= 1e7 else (1e3, "µs")
    boxes: list[Any] = []
    owners: list[int] = []
    cuts = []
    for worker, pieces in enumerate(numbers.workers):
        at = 0.0
        for index, each in enumerate(pieces):
            if not each.whole and each.piece.kv_begin > 0:
                cuts.append((at, worker))
            width = each.cost / scale
            # Heads and tiles of a request are one box.
            if index and pieces[index - 1].request == each.request:
                boxes[-1].set_width(boxes[-1].get_width() + width)
            else:
                boxes.append(Rectangle((at, worker - 0.42), width, 0.84))
                owners.append(each.request)
            at += width
    faces = [colors[request] for request in owners]
    axes.add_collection(PatchCollection(boxes, facecolors=faces, edgecolors="white", linewidths=0.4))
    if len(numbers.workers) <= _NAMED_WORKERS:
        for box, request in zip(boxes, owners, strict=True):
            if box.get_width() > 0.03 * longest / scale:
                middle = box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2
                axes.annotate(
                    f"{request}", middle, ha="center", va="center", fontsize=7, color=_readable(colors[request])
                )
    if cuts:
        size = min(30.0, max(4.0, 700 / len(numbers.workers)))
        label = f"goes on with an item of the worker before ({numbers.splits} items split)"
        axes.scatter(
            *zip(*cuts, strict=True), marker="<", s=size, color=_INK, lw=0, zorder=3, clip_on=False, label=label
        )
    axes.axvline(numbers.mean / scale, color=_INK, linewidth=1.1, label="mean of the workers")
    axes.axvline(
        numbers.algorithm1 / scale,
        color=_RED,
        linewidth=1.4,
        linestyle=(0, (4, 2)),
        label=f"Algorithm 1's makespan, {numbers.algorithm1 / max(numbers.makespan, 1):.3f} x this plan's",
    )
    axes.set_xlim(0, longest / scale * 1.03)
    axes.set_ylim(len(numbers.workers) - 0.4, -0.6)
    axes.set_xlabel(f"{unit} by the cost model")
    axes.set_ylabel("worker")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_title(f"{len(numbers.workers)} workers: the busiest has {numbers.imbalance:.3f} x the mean", fontsize=10)
    _plain(axes)


def _draw_pattern(axes: Any, step: Lengths, plan: Plan, colors: Sequence[Color]) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    stretches, columns = pattern(step, plan)
    tops = _tops(plan)
    boxes = []
    for each in stretches:
        top, bottom = tops[each.row], tops[each.row + 1]
        boxes.append(Rectangle((each.begin, top), each.width, bottom - top))
    faces = [colors[each.request] for each in stretches]
    # An edge of its own colour: a stretch of one page among a million slots is still a line.
    axes.add_collection(PatchCollection(boxes, facecolors=faces, edgecolors=faces, linewidths=0.5))
    _mark_requests(axes, plan, tops)
    axes.set_xlim(0, max(columns, 1))
    axes.set_ylim(tops[-1] or 1, 0)
    axes.set_xlabel("KV slots, a shared prefix once" if step.prefixes else "KV slots")
    several = plan.num_tiles > len(set(plan.tile_request.tolist()))
    axes.set_ylabel("request (query tiles, drawn by their square root)" if several else "request")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.get_major_locator().set_params(nbins=6)
    shared = sum(step.kv) - columns
    axes.set_title(
        f"block-sparse pattern: {plan.num_tiles:,} query tiles x {columns:,} slots"
        + (f", {shared:,} shared" if shared else ""),
        fontsize=10,
    )
    _plain(axes)


def _tops(plan: Plan) -> list[float]:
    """The upper edge of each row of the pattern, and the lower one of the last. A prefill leaves room for decodes."""
    requests = sorted(plan.tile_request.tolist())
    tiles = Counter(requests)
    tops = [0.0]
    for request in requests:
        tops.append(tops[-1] + tiles[request] ** -0.5)
    return tops


def _mark_requests(axes: Any, plan: Plan, tops: Sequence[float]) -> None:
    requests = sorted(plan.tile_request.tolist())
    tiles = Counter(requests)
    shown = sorted(tiles)[:: max(1, -(-len(tiles) // _NAMED_REQUESTS))]
    first = {request: requests.index(request) for request in shown}
    middles = [(tops[first[request]] + tops[first[request] + tiles[request]]) / 2 for request in shown]
    labels = [f"{request}" if tiles[request] == 1 else f"{request} ({tiles[request]:,})" for request in shown]
    axes.set_yticks(middles, labels, fontsize=7)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_FAINT, labelcolor=_INK, length=3)
