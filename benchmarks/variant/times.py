"""Times of variants: against flex_attention, and against causal by the KV tiles that are executed."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from report import Row, Target
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnloom import mask_mod
from attnloom.core.variants import Causal, SlidingWindow
from variant.cases import CASES, DECODES, PREFILLS, Problem, Shape, Spelled, document_masks

AGAINST_FLEX, BY_TILES = Target("ratio", 1.25), Target("ratio", 1.15)
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}  # of the largest output
LONG = 4096


def flex_rows(threads: int, wanted: re.Pattern[str], pairs: int) -> Iterator[Row]:
    """The catalogue against flex_attention."""
    for phase, requests, qo_len, kv_len in (("prefill", 2, 1024, 1024), ("decode", 8, 1, 2048)):
        for dtype in ("fp32", "bf16"):
            for head_dim in (64, 128):
                shape = Shape(phase, requests, qo_len, kv_len, head_dim, dtype)
                cases = PREFILLS if phase == "prefill" else DECODES
                names = {case: f"{case}: {shape} {plural(threads)}" for case in cases}
                problem = None
                for case, name in names.items():
                    if wanted.search(name):
                        problem = problem or Problem(shape)
                        yield shown(flex_row(name, problem, CASES[case](shape), threads, pairs))


def flex_row(name: str, problem: Problem, spelled: Spelled, threads: int, pairs: int) -> Row:
    """Check both, then time them in turns."""
    ours, plan = problem.step(spelled)
    theirs = flex_step(problem, spelled)
    shape = problem.shape
    outs = {
        "ours": ours().unflatten(0, (shape.requests, -1)).transpose(1, 2).double(),
        "flex_attention": theirs().double(),
    }
    expected = problem.expected(spelled)
    size = expected.abs().max()
    errors = {side: float((out - expected).abs().max() / size) for side, out in outs.items()}
    errors["between them"] = float((outs["ours"] - outs["flex_attention"]).abs().max() / size)
    # NaN compares false.
    if any(not error <= TOLERANCE[shape.dtype] for error in errors.values()):
        raise SystemExit(f"{name}: outputs differ: {errors}")
    wall, cpu = in_turns({"ours": ours, "flex_attention": theirs}, pairs)
    detail = {"error": {side: float(f"{error:.1e}") for side, error in errors.items()}}
    return timed_row(name, wall, cpu, threads, AGAINST_FLEX, {**detail, "tiles": int(plan().worker_tiles().sum())})


def flex_step(problem: Problem, spelled: Spelled) -> Callable[[], Tensor]:
    """flex_attention compiled for the shape; its BlockMask is made once."""
    # A case compiles once; the guards of the one before would count as recompilations of it.
    torch._dynamo.reset()
    shape = problem.shape
    q, k, v = problem.dense()
    first, rotate = shape.first, spelled.rotate
    scores, mask = spelled.score_mod, spelled.mask_mod
    if first and scores is not None:

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return scores(score, b, h, q + first, k)
    else:
        score_mod = scores
    if first and mask is not None:

        def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            return mask(b, h, q + first, k)
    else:
        mask_mod = mask
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, shape.requests, None, shape.qo_len, shape.kv_len, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rotate is not None:
            q, k = rotate(q, first), rotate(k, 0)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)  # type: ignore

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def step() -> Tensor:
        with torch.no_grad():
            return compiled(q, k, v)

    return step


def tile_rows(threads: int, wanted: re.Pattern[str], pairs: int) -> Iterator[Row]:
    """Sliding windows and document masks of 4096 tokens: time against causal, over tiles against causal."""
    for dtype in ("fp32", "bf16"):
        shape = Shape("prefill", 1, LONG, LONG, 128, dtype)
        window = mask_mod(lambda b, h, q, k: q - k < 512, "window")
        lengths = [768, 1024, 512, 1792]
        cases = {
            "sliding window 512, band": Spelled(SlidingWindow(512)),
            "sliding window 2048, band": Spelled(SlidingWindow(2048)),
            "sliding window 512, block mask": Spelled(window & Causal(), block_mask=True),
            "documents, block mask": document_masks(shape, lengths, declared=False),
            "documents, declared range": document_masks(shape, lengths),
        }
        problem = None
        for case, spelled in cases.items():
            name = f"{case}: {shape} {plural(threads)}"
            if wanted.search(name):
                problem = problem or Problem(shape)
                yield shown(tile_row(name, problem, spelled, threads, pairs))


def tile_row(name: str, problem: Problem, spelled: Spelled, threads: int, pairs: int) -> Row:
    """Time in turns with causal; the ratio is that of times over that of executed KV tiles."""
    ours, plan = problem.step(spelled)
    causal, causal_plan = problem.step(Spelled(Causal()))
    ours(), causal()
    tiles = {side: int(made().worker_tiles().sum()) for side, made in (("ours", plan), ("causal", causal_plan))}
    wall, cpu = in_turns({"ours": ours, "causal": causal}, pairs)
    row = timed_row(name, wall, cpu, threads, BY_TILES, {"tiles": tiles})
    assert row.ratio is not None
    share = tiles["ours"] / tiles["causal"]
    times = {"ratio_of_times": row.ratio, "ratio_of_tiles": round(share, 4)}
    return Row(**{**vars(row), "ratio": round(row.ratio / share, 4), "detail": {**row.detail, **times}})


def in_turns(
    sides: dict[str, Callable[[], Any]], pairs: int, seconds: float = 2.0
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(wall, CPU) us of each side's calls, taken A B A B: ``pairs`` of them, and more while they take no time."""
    wall: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    stop = time.perf_counter() + seconds
    while len(wall["ours"]) < pairs or (time.perf_counter() < stop and len(wall["ours"]) < 20 * pairs):
        for side, step in sides.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            step()
            wall[side].append((time.perf_counter() - begin) * 1e6)
            cpu[side].append((time.process_time() - cpu_begin) * 1e6)
    return wall, cpu


def timed_row(
    name: str,
    wall: dict[str, list[float]],
    cpu: dict[str, list[float]],
    threads: int,
    target: Target,
    detail: dict[str, Any],
) -> Row:
    """A row of medians: of CPU time on one thread, of wall time on more."""
    peer = next(side for side in wall if side != "ours")
    quoted = cpu if threads == 1 else wall
    medians = {side: statistics.median(quoted[side]) for side in quoted}
    clocks = {
        clock: {side: round(statistics.median(samples), 1) for side, samples in times.items()}
        for clock, times in (("wall_us", wall), ("cpu_us", cpu))
    }
    return Row(
        name,
        round(medians["ours"], 1),
        peers={peer: round(medians[peer], 1)},
        ratio=round(medians["ours"] / medians[peer], 4),
        target=target,
        detail={
            "threads": threads,
            "clock": "cpu" if threads == 1 else "wall",
            "pairs": len(wall["ours"]),
            **clocks,
            "min_wall_us": {side: round(min(samples), 1) for side, samples in wall.items()},
            **detail,
        },
    )


def shown(row: Row) -> Row:
    peer, theirs = next(iter(row.peers.items()))
    met = "" if row.met else "  MISSED"
    print(f"  {row.row}: {row.ours:,.0f} us, {peer} {theirs:,.0f} us, ratio {row.ratio:.3f}{met}", flush=True)
    return row


def plural(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"
