"""A picture of a result file: everyone's time over the best peer's, and how far ours is from the card's ceilings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDEST = 3.0  # times the best peer; what is slower is drawn there, with its figure
MARKERS = "osD^vP"


def draw(results: Path, picture: Path) -> None:
    """Draw ``results``, a file of kernels.py, to ``picture``, in the format of its ending.

    Raises:
        ValueError: the file has no rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(results.read_text())
    rows: list[dict[str, Any]] = data["rows"]
    if not rows:
        raise ValueError(f"results={results}: expected a file with rows")
    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(13, 1.6 + 0.42 * len(rows)), width_ratios=(3, 1), layout="constrained"
    )
    places = range(len(rows))
    best = [min(row["peers_us"].values(), default=row["ours_us"]) for row in rows]
    left.barh(places, [min(row["ours_us"] / b, WIDEST) for row, b in zip(rows, best, strict=True)], label="attnloom")
    names = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    for name, marker in zip(names, MARKERS, strict=False):
        points = [
            (place, row["peers_us"][name] / best[place]) for place, row in enumerate(rows) if name in row["peers_us"]
        ]
        left.scatter(
            [min(x, WIDEST) for _, x in points], [place for place, _ in points], marker=marker, label=name, zorder=3
        )
        for place, x in points:
            if x > WIDEST:
                left.annotate(f"{x:.1f}", (WIDEST, place), (4, 3), textcoords="offset points", fontsize=7)
    limits = [float(row["target"].split()[-1]) for row in rows]
    left.scatter(limits, list(places), marker="|", s=260, color="black", label="target", zorder=4)
    left.axvline(1, color="grey", linewidth=0.8)
    left.set_yticks(list(places), [row["row"] for row in rows])
    left.invert_yaxis()
    left.set_xlim(0, WIDEST * 1.05)
    left.set_xlabel("time / best peer's")
    figure.legend(fontsize=8, loc="outside lower center", ncols=8)
    right.barh(places, [row["detail"]["share"] for row in rows], color="tab:green")
    right.axvline(1, color="grey", linewidth=0.8)
    right.set_xlabel("share of the card's rate")
    figure.suptitle(f"{data['card']}, driver {data['driver']}, commit {data['commit']}, {data['date'][:10]}")
    figure.savefig(picture)
    pyplot.close(figure)
