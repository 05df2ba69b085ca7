"""``attnloom plan``: what a step would run, before it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from attnloom.core.cli import lengths as sources
from attnloom.core.cli.catalogue import DTYPES
from attnloom.core.cli.lengths import Lengths
from attnloom.core.cli.text import count, size
from attnloom.core.errors import shown
from attnloom.core.settings import MOST_WORKERS

if TYPE_CHECKING:
    from attnloom.core.cli.balance import Balance
    from attnloom.core.plan import Plan

_SHOWN_WORKERS = 32


def command(
    kv: Annotated[str | None, typer.Option(metavar="N,N,...", help="KV tokens of each request.")] = None,
    q: Annotated[str, typer.Option(metavar="N,N,...", help="Query tokens: of each request, or of all.")] = "1",
    zipf: Annotated[bool, typer.Option("--zipf", help="KV lengths by Zipf's law.")] = False,
    uniform: Annotated[bool, typer.Option("--uniform", help="KV lengths equally likely up to twice the mean.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests of a trace: CSV as AzurePublicDataset has it, or JSON lines as Mooncake has them.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests of a distribution or a trace.")] = 32,
    mean: Annotated[int, typer.Option(min=1, help="Mean KV length of a distribution.")] = 4096,
    skip: Annotated[int, typer.Option(min=0, help="Requests of the trace that come before.")] = 0,
    prefill: Annotated[int, typer.Option(min=0, help="How many of the requests compute their whole prompt.")] = 0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help=f"Of queries and caches: {', '.join(DTYPES)}.")] = "bf16",
    window: Annotated[
        int | None, typer.Option(min=1, help="Keys that a query sees, its own included. Default: all before it.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Queries see all keys, those after them too.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers. Default: ATTNLOOM_WORKERS, or the threads of this machine.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plan: PNG, SVG or PDF.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a step from lengths, from a distribution, or from a trace."""
    chosen = [
        name for name, value in (("--kv", kv), ("--zipf", zipf), ("--uniform", uniform), ("--trace", trace)) if value
    ]
    if len(chosen) != 1:
        raise typer.BadParameter(
            f"expected one of --kv, --zipf, --uniform, --trace; got {' and '.join(chosen) or 'none'}"
        )
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if full and window is not None:
        raise typer.BadParameter("--full and --window exclude each other")
    for option, value in (("--batch", batch), ("--mean", mean)):
        if value >= 2**30:
            raise ValueError(f"{option} {shown(value)}: expected fewer than 2**30")
    if workers is not None and workers > MOST_WORKERS:
        raise ValueError(f"--workers {shown(workers)}: expected at most {MOST_WORKERS}")
    queries = _numbers("--q", q)
    if kv is None and len(queries) != 1:
        raise typer.BadParameter(f"--q {q}: expected one length, which is that of all requests drawn")
    if trace is not None:
        if queries != [1]:
            raise typer.BadParameter("--q goes with given or drawn lengths; a trace has --prefill")
        step = sources.trace(trace, batch, skip, seed, prefill)
    elif kv is not None:
        step = sources.prefill_first(sources.given(_numbers("--kv", kv), queries), prefill)
    else:
        draw = sources.zipf if zipf else sources.uniform
        step = sources.prefill_first(draw(batch, mean, seed, queries[0]), prefill)

    from attnloom.core.cli.balance import balance

    plan = _plan(step, heads, kv_heads, window, full, workers)
    numbers = balance(plan, step.kv, head_dim=head_dim, element_bytes=DTYPES[dtype].itemsize)
    if as_json:
        print(json.dumps(_as_table(step, plan, numbers), indent=1))
    else:
        _show(step, plan, numbers)
    if plot is not None:
        from attnloom.core.cli.picture import draw as draw_picture

        draw_picture(step, plan, numbers, plot)
        if not as_json:
            Console(highlight=False).print(f"drawn in {plot}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: expected numbers with commas between them") from None


def _plan(step: Lengths, heads: int, kv_heads: int, window: int | None, full: bool, workers: int | None) -> Plan:
    import torch

    from attnloom.core.plan import PlanKey
    from attnloom.core.planner import plan_scan
    from attnloom.core.settings import settings
    from attnloom.core.tiles import MAX_GROUP, family_for
    from attnloom.core.variants import Causal, Full, SlidingWindow

    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise typer.BadParameter(
            f"--heads {heads}: expected a multiple of --kv-heads {kv_heads}, at most {MAX_GROUP} times"
        )
    device = torch.device("cpu")
    tiles = family_for(device).tiles
    variant = Full() if full else Causal() if window is None else SlidingWindow(window)
    key = PlanKey(heads, kv_heads, tiles.tile_q_short, tiles.tile_q, tiles.tile_kv, variant.left, variant.right, device)
    indptr = torch.tensor([0, *step.q]).cumsum(0)
    if int(indptr[-1]) * (heads // kv_heads) >= 2**31:
        raise ValueError(f"{int(indptr[-1])} queries in one step: expected at most {2**31 // (heads // kv_heads)}")
    return plan_scan(
        indptr.int(),
        torch.tensor(step.kv, dtype=torch.int32),
        key,
        num_workers=workers or settings().workers or torch.get_num_threads(),
        costs=tiles.costs,
    )


def _as_table(step: Lengths, plan: Plan, numbers: Balance) -> dict[str, object]:
    return {
        "source": step.source,
        "requests": plan.num_requests,
        "queries": plan.total_q,
        "kv_tokens": sum(step.kv),
        "workers": plan.num_workers,
        "query_tiles": plan.num_tiles,
        "items": numbers.items,
        "kv_tiles": numbers.kv_tiles,
        "splits": numbers.splits,
        "partial_states": numbers.partials,
        "costs": plan.costs.__dict__,
        "mean_cost": numbers.mean,
        "makespan": numbers.makespan,
        "balance": numbers.imbalance,
        "algorithm1": {"makespan": numbers.algorithm1, "chunks": numbers.algorithm1_chunks},
        "bytes": {
            "kv_stored": numbers.kv_bytes,
            "kv_read": numbers.read_bytes,
            "rows": numbers.row_bytes,
            "partial_states": numbers.partial_bytes,
        },
        "worker_cost": numbers.costs,
        "worker_kv_tiles": plan.worker_tiles().tolist(),
        "worker_requests": [sorted({each.request for each in pieces}) for pieces in numbers.workers],
    }


def _show(step: Lengths, plan: Plan, numbers: Balance) -> None:
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    key = plan.key
    queries = "1 query" if plan.total_q == 1 else f"{plan.total_q:,} queries"
    table.add_row(
        "step",
        f"{count(plan.num_requests, 'request')} ({step.source}), {queries}, {sum(step.kv):,} KV tokens, "
        f"{key.num_qo_heads}/{key.num_kv_heads} heads",
    )
    table.add_row(
        "load",
        f"{count(plan.num_tiles, 'query tile')} of up to {key.tile_q} rows x {key.num_kv_heads} kv heads = "
        f"{count(numbers.items, 'item')}, {numbers.kv_tiles:,} KV tiles of {key.tile_kv} tokens",
    )
    table.add_row(
        "balance",
        f"{count(plan.num_workers, 'worker')}, the busiest has {numbers.imbalance:.3f} x the mean; "
        f"{count(numbers.splits, 'item')} split, {count(numbers.partials, 'partial state')}",
    )
    table.add_row(
        "makespan",
        f"{numbers.makespan / 1e3:,.1f} µs by the cost model, Algorithm 1's {numbers.algorithm1 / 1e3:,.1f} µs "
        f"({numbers.algorithm1 / numbers.makespan:.3f} x, {count(numbers.algorithm1_chunks, 'chunk')}), "
        f"mean {numbers.mean / 1e3:,.1f} µs"
        if numbers.makespan
        else "nothing to do",
    )
    table.add_row(
        "bytes",
        f"{size(numbers.kv_bytes)} of KV per layer, {size(numbers.read_bytes)} read in whole tiles, "
        f"{size(numbers.row_bytes)} of queries and rows, {size(numbers.partial_bytes)} of partial states",
    )
    console.print(table)
    console.print(_workers(plan, numbers))
    hidden = plan.num_workers - _SHOWN_WORKERS
    if hidden > 0:
        console.print(f"... and {count(hidden, 'worker')} more (--json has all)")


def _workers(plan: Plan, numbers: Balance) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "µs", "KV tiles"):
        table.add_column(name, justify="right")
    table.add_column("load", no_wrap=True)
    table.add_column("requests", overflow="ellipsis", no_wrap=True)
    widest = max(numbers.makespan, 1)
    tiles = plan.worker_tiles().tolist()
    for worker, cost in enumerate(numbers.costs[:_SHOWN_WORKERS]):
        requests = sorted({each.request for each in numbers.workers[worker]})
        named = f"{requests[0]}" if len(requests) == 1 else f"{requests[0]}-{requests[-1]}" if requests else ""
        table.add_row(f"{worker}", f"{cost / 1e3:,.1f}", f"{tiles[worker]:,}", "█" * round(24 * cost / widest), named)
    return table
