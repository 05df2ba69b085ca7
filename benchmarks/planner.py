"""The host planner: time of a plan, balance against Algorithm 1, and growth with the number of requests.

    python benchmarks/planner.py [--seconds 3] [--json FILE]

A step of decodes (one query each) whose KV lengths follow Zipf's law, length proportional to 1 / rank, in random order.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from report import Row, Target, arguments, publish

from attnloom import Attention, BlockSparseLayout, Plan, plan_algorithm1, plan_scan
from attnloom.core.abi import PLAN_HEADER_WORDS, PlanHeader, PlanParams
from attnloom.core.host import host_module
from attnloom.core.plan import PlanKey
from attnloom.core.tiles import CPU, Costs

MEAN, WORKERS = 4096, 132
HEADS = (32, 8)
PAGE = 16
# A GPU's decode is bound by bytes: rows are free, an item as much as half a KV tile.
GPU_KEY = PlanKey(*HEADS, 16, 128, 64, None, 0, torch.device("cpu"))
GPU_COSTS = Costs(item=8, item_row=0, kv_tile=16, row=0)
CPU_TILES = CPU.tiles
CPU_KEY = PlanKey(*HEADS, CPU_TILES.tile_q_short, CPU_TILES.tile_q, CPU_TILES.tile_kv, None, 0, torch.device("cpu"))
SEEDS = range(10)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="per timed row")
    options = parser.parse_args()
    rows = [*time_rows(options.seconds), *balance_rows(), *growth_rows(options.seconds)]
    publish("planner", rows, options.json)


def zipf_lengths(requests: int, seed: int) -> torch.Tensor:
    """int32 [requests], mean ``MEAN``."""
    weights = 1.0 / torch.arange(1, requests + 1, dtype=torch.float64)
    lengths = (weights * (MEAN * requests / weights.sum())).round().clamp(min=1).int()
    return lengths[torch.randperm(requests, generator=torch.Generator().manual_seed(seed))]


def decode_indptr(requests: int) -> torch.Tensor:
    return torch.arange(requests + 1, dtype=torch.int32)


def timed(call: Callable[[], object], seconds: float) -> dict[str, float]:
    """Median and minimum in us; every call is a sample, so that what others do to the machine stays in few of them."""
    samples = []
    stop = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < stop:
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    return {"median_us": statistics.median(samples), "min_us": min(samples), "calls": len(samples)}


def scan_alone(plan: Plan, indptr: torch.Tensor, lengths: torch.Tensor) -> Callable[[], bool]:
    """The C++ call inside ``plan_scan``, on the buffer of a plan that it made."""
    costs = plan.costs
    header = PlanHeader.from_buffer_copy(plan.buffer[:PLAN_HEADER_WORDS].numpy().tobytes())
    params = PlanParams(
        indptr.data_ptr(),
        lengths.data_ptr(),
        plan.buffer.data_ptr(),
        costs.item,
        costs.item_row,
        costs.kv_tile,
        costs.row,
    )
    scan = host_module().attnloom_plan_scan

    def call() -> bool:
        # Naming the plan here keeps its buffer alive.
        same: bool = scan(ctypes.byref(params), ctypes.byref(header)) == plan.num_tiles
        return same

    if not call():
        raise SystemExit("the C++ call made another plan than plan_scan did")
    return call


def time_rows(seconds: float) -> list[Row]:
    """Time of one plan of 256 requests."""
    requests = 256
    indptr, lengths = decode_indptr(requests), zipf_lengths(requests, 0)
    name = f"{requests} requests, {WORKERS} workers"

    def row(what: str, call: Callable[[], object], target: Target | None = None) -> Row:
        found = timed(call, seconds)
        detail = {"min_us": round(found["min_us"], 2), "calls": found["calls"]}
        return Row(what, round(found["median_us"], 2), target=target, detail=detail)

    def plan() -> Plan:
        return plan_scan(indptr, lengths, GPU_KEY, num_workers=WORKERS, costs=GPU_COSTS)

    made = plan()
    pages = -(-int(lengths.max()) // PAGE)
    table = torch.zeros(requests, pages, dtype=torch.int32)
    layout = BlockSparseLayout.from_page_table(table, lengths, PAGE)
    engine = Attention(*HEADS, 128, dtype=torch.bfloat16)
    return [
        row(f"plan_scan, {name}", plan, Target("ours", 40, "us")),
        row("  its C++ call alone", scan_alone(made, indptr, lengths)),
        row(f"engine.plan on cpu, {name}", lambda: engine.plan(indptr, layout, num_workers=WORKERS)),
        row("layout from a page table", lambda: BlockSparseLayout.from_page_table(table, lengths, PAGE)),
        row("plan_algorithm1 of the same tiles", lambda: plan_algorithm1(made)),
    ]


def worker_costs(plan: Plan) -> list[int]:
    """Cost of each worker's pieces by the cost model; every piece of an item pays what one costs beside KV tiles."""
    rows = plan.tile_rows.tolist()
    costs = [0] * plan.num_workers
    for piece in plan.pieces():
        costs[piece.worker] += plan.costs.of(rows[piece.tile], piece.kv_end - piece.kv_begin)
    return costs


def balance_rows() -> list[Row]:
    """Load of the busiest worker over the mean; the worst of several orders of the requests."""
    rows = []
    for name, key, costs in (("GPU decode", GPU_KEY, GPU_COSTS), ("cpu family", CPU_KEY, CPU_TILES.costs)):
        tiles, cost = [], []
        for seed in SEEDS:
            plan = plan_scan(decode_indptr(256), zipf_lengths(256, seed), key, num_workers=WORKERS, costs=costs)
            yardstick = plan_algorithm1(plan)
            executed = plan.worker_tiles()
            if int(executed.sum()) != int(yardstick.worker_tiles.sum()):
                raise SystemExit("the plan and the yardstick execute different tiles")
            mean = float(executed.sum()) / WORKERS
            tiles.append((int(executed.max()) / mean, int(yardstick.worker_tiles.max()) / mean))
            # Both over the same ideal: every item whole, nothing split, an equal share for each worker.
            whole = map(costs.of, plan.tile_rows.tolist(), plan.tile_kv_tiles.tolist())
            ideal = sum(whole) * key.num_kv_heads / WORKERS
            cost.append((max(worker_costs(plan)) / ideal, yardstick.makespan / ideal))
        detail = {**asdict(costs), "orders": len(SEEDS)}
        for what, pairs, target in (
            ("busiest / mean, executed tiles", tiles, Target("ours", 1.03, "x")),
            ("makespan / ideal, cost model", cost, Target("ratio", 1.0)),
        ):
            ours, theirs = (max(pair[side] for pair in pairs) for side in (0, 1))
            ratio = max(pair[0] / pair[1] for pair in pairs)
            rows.append(
                Row(
                    f"{name} costs: {what}",
                    round(ours, 4),
                    "x",
                    {"Algorithm 1": round(theirs, 4)},
                    round(ratio, 4),
                    target,
                    detail,
                )
            )
    return rows


def growth_rows(seconds: float) -> list[Row]:
    """Time and bytes of plans of 1,000 to 20,000 requests; twice as many may not cost more than twice as much."""
    found = []
    for requests in (1000, 5000, 20000):
        indptr, lengths = decode_indptr(requests), zipf_lengths(requests, 0)

        def plan(indptr: torch.Tensor = indptr, lengths: torch.Tensor = lengths) -> Plan:
            return plan_scan(indptr, lengths, GPU_KEY, num_workers=WORKERS, costs=GPU_COSTS)

        size = plan().buffer.numel() * 4
        found.append((requests, timed(plan, seconds), size))
    base_requests, base, base_size = found[0]
    rows = []
    for requests, times, size in found:
        growth = requests / base_requests
        rows.append(
            Row(
                f"plan_scan, {requests:,} requests",
                round(times["median_us"], 1),
                peers={"linear": round(base["median_us"] * growth, 1)},
                ratio=round(times["median_us"] / (base["median_us"] * growth), 4),
                target=None if growth == 1 else Target("ratio", 1.1),
                detail={
                    "min_us": round(times["min_us"], 1),
                    "ratio_of_min": round(times["min_us"] / (base["min_us"] * growth), 4),
                    "ns_per_request": round(times["median_us"] * 1e3 / requests, 1),
                    "bytes": size,
                    "bytes_per_request": round(size / requests, 2),
                    "calls": times["calls"],
                },
            )
        )
        rows.append(
            Row(
                f"  its bytes, {requests:,} requests",
                size,
                "bytes",
                {"linear": round(base_size * growth)},
                round(size / (base_size * growth), 4),
                None if growth == 1 else Target("ratio", 1.0),
            )
        )
    return rows


if __name__ == "__main__":
    main()
