"""The decode kernel of the sm80 family on a GPU, beside vLLM's FlashAttention-3 where vLLM is installed.

Medians of CUDA-graph replays with the L2 flushed between them, ours and the peer's in turn on the same tensors; each
row is checked against float64 first, for unwritten rows, and for bitwise repeatability. The plan is the host's; making
it is not in the time (benchmarks/planner.py measures that).
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from report import Row, Target, arguments, publish
from torch import Tensor

from attnloom import BlockSparseLayout, plan_scan, variants
from attnloom.core import launch
from attnloom.core.abi import AttentionParams, BlockMaskTensor
from attnloom.core.jit.module import load
from attnloom.core.kernels import attention_spec
from attnloom.core.plan import PlanKey
from attnloom.core.tiles import Costs

TILE_Q, TILE_KV, CTAS_PER_SM = 16, 64, 2
COSTS = Costs(item=8, kv_tile=16, row=0)
FLUSH_BYTES = 256 << 20  # several times the L2


@dataclass(frozen=True)
class Shape:
    """One row: KV lengths and heads."""

    kv_lens: tuple[int, ...]
    page_size: int
    target: float
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    qo_len: int = 1
    window: int | None = None


def zipf(requests: int, mean: int) -> tuple[int, ...]:
    """Lengths proportional to 1 / rank."""
    weights = [1 / rank for rank in range(1, requests + 1)]
    return tuple(max(1, round(weight / sum(weights) * mean * requests)) for weight in weights)


def uniform(requests: int, low: int, high: int) -> tuple[int, ...]:
    """Lengths drawn uniformly, the same every time."""
    return tuple(torch.randint(low, high + 1, (requests,), generator=torch.Generator().manual_seed(0)).tolist())


SHAPES = {
    "decode 64 x 4096 (16)": Shape((4096,) * 64, 16, 1.01),
    "decode 1 x 131072 (16)": Shape((131072,), 16, 0.95),
    "decode 16 x 16384 (16)": Shape((16384,) * 16, 16, 1.01),
    "decode 256 x 1024 (16)": Shape((1024,) * 256, 16, 0.98),
    "decode 64, Zipf, mean 4096 (16)": Shape(zipf(64, 4096), 16, 0.90),
    "decode 64, Zipf, mean 4096 (1)": Shape(zipf(64, 4096), 1, 0.91),
    "decode 128, U(512, 2048) (16)": Shape(uniform(128, 512, 2048), 16, 0.97),
    "verify 64 x 4 drafts, 4096 (16)": Shape((4096,) * 64, 16, 1.01, qo_len=4),
    "decode 128 x 2048, 64/8 heads, head_dim 64, window 128 (16)": Shape((2048,) * 128, 16, 0.65, 64, 8, 64, 1, 128),
}


class Case:
    """The tensors of a shape, and ours ready to launch."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.kv_lens = torch.tensor(shape.kv_lens, dtype=torch.int32)
        requests, page = len(shape.kv_lens), shape.page_size
        pages = (self.kv_lens + page - 1) // page
        shuffled = torch.randperm(int(pages.sum())).to(torch.int32)
        table = torch.zeros(requests, int(pages.max()), dtype=torch.int32)
        for row, part in zip(table, shuffled.split(pages.tolist()), strict=True):
            row[: part.shape[0]] = part
        cache = (int(pages.sum()), page, shape.num_kv_heads, shape.head_dim)
        self.k = torch.randn(cache, device="cuda", dtype=torch.bfloat16)
        self.v = torch.randn_like(self.k)
        self.q = torch.randn(
            requests * shape.qo_len, shape.num_qo_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16
        )
        self.out = torch.full_like(self.q, math.nan)
        self.qo_indptr = torch.arange(requests + 1, dtype=torch.int32) * shape.qo_len
        self.table, self.lengths = table.cuda(), self.kv_lens.cuda()
        self._prepare()

    def _prepare(self) -> None:
        shape = self.shape
        self.workers = torch.cuda.get_device_properties(0).multi_processor_count * CTAS_PER_SM
        variant = variants.Causal() if shape.window is None else variants.SlidingWindow(shape.window)
        key = PlanKey(
            shape.num_qo_heads, shape.num_kv_heads, TILE_Q, TILE_Q, TILE_KV, variant.left, 0, torch.device("cpu")
        )
        plan = plan_scan(
            self.qo_indptr,
            self.kv_lens,
            key,
            num_workers=self.workers,
            lockstep=math.gcd(shape.num_kv_heads, self.workers),
            costs=COSTS,
        )
        self.layout = BlockSparseLayout.from_page_table(self.table, self.lengths, shape.page_size)
        self.plan = plan.buffer.cuda()
        self.arena = torch.empty(2 * self.workers * TILE_Q * (shape.head_dim + 1), device="cuda")
        self.arrivals = torch.zeros(self.workers, dtype=torch.int32, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        target = "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
        spec = attention_spec("sm80", torch.bfloat16, shape.head_dim, shape.head_dim, variant, target)
        self.kernel = load(spec).attnloom_run_decode
        self.kernel.argtypes = [ctypes.POINTER(AttentionParams), ctypes.c_int32, ctypes.c_void_p]
        self.params = AttentionParams(
            launch.rows_tensor(self.q),
            launch.cache_tensor(self.k),
            launch.cache_tensor(self.v),
            launch.rows_tensor(self.out),
            None,
            launch.layout_tensors(self.layout),
            BlockMaskTensor(),
            self.plan.data_ptr(),
            self.arena.data_ptr(),
            self.arrivals.data_ptr(),
            None,
            shape.head_dim**-0.5,
            1.0,
            1.0,
            0,
            1,
        )

    def run(self) -> None:
        """Launch on the current stream."""
        error = self.kernel(ctypes.byref(self.params), self.workers, torch.cuda.current_stream().cuda_stream)
        if error:
            raise RuntimeError(f"launch failed with CUDA error {error}")

    @property
    def bytes_read(self) -> int:
        """K and V that some query sees."""
        shape = self.shape
        seen = self.kv_lens if shape.window is None else self.kv_lens.clamp(max=shape.window + shape.qo_len - 1)
        return int(seen.sum()) * shape.num_kv_heads * shape.head_dim * 2 * 2

    def check(self, requests: int = 6) -> float:
        """Relative error against float64 on some requests; every row written, two runs bitwise the same."""
        self.run()
        first = self.out.clone()
        self.run()
        torch.cuda.synchronize()
        if not torch.equal(first, self.out) or bool(self.out.isnan().any()):
            raise RuntimeError("unwritten rows, or two runs that differ")
        worst = 0.0
        for request in torch.randperm(len(self.shape.kv_lens))[:requests].tolist():
            expected = self._reference(request)
            rows = slice(request * self.shape.qo_len, (request + 1) * self.shape.qo_len)
            error = (self.out[rows].double() - expected).norm() / expected.norm()
            worst = max(worst, float(error))
        if not worst < 5e-3:
            raise RuntimeError(f"relative error {worst}")
        return worst

    def _reference(self, request: int) -> Tensor:
        shape, length = self.shape, self.shape.kv_lens[request]
        pages = self.table[request, : -(-length // shape.page_size)].long()
        k, v = (
            cache[pages].reshape(-1, shape.num_kv_heads, shape.head_dim)[:length].double() for cache in (self.k, self.v)
        )
        q = self.q[request * shape.qo_len : (request + 1) * shape.qo_len].double()
        q = q.view(shape.qo_len, shape.num_kv_heads, -1, shape.head_dim)
        scores = torch.einsum("qhgd,khd->qhgk", q, k) * shape.head_dim**-0.5
        position = torch.arange(shape.qo_len, device="cuda")[:, None] + length - shape.qo_len
        key = torch.arange(length, device="cuda")[None, :]
        seen = key <= position
        if shape.window is not None:
            seen &= key > position - shape.window
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        out = torch.einsum("qhgk,khd->qhgd", scores.softmax(-1), v)
        return out.reshape(shape.qo_len, shape.num_qo_heads, shape.head_dim)


def flash_attention_3(case: Case) -> Callable[[], None] | None:
    """vLLM's FA3 on the same tensors, with its scheduler metadata; None where vLLM is not installed."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
    except ImportError:
        return None
    shape = case.shape
    window = [-1, -1] if shape.window is None else [shape.window - 1, 0]
    longest, indptr, out = max(shape.kv_lens), case.qo_indptr.cuda(), torch.empty_like(case.q)
    metadata = get_scheduler_metadata(
        batch_size=len(shape.kv_lens),
        max_seqlen_q=shape.qo_len,
        max_seqlen_k=longest,
        num_heads_q=shape.num_qo_heads,
        num_heads_kv=shape.num_kv_heads,
        headdim=shape.head_dim,
        cache_seqlens=case.lengths,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=indptr,
        page_size=shape.page_size,
        causal=True,
        window_size=tuple(window),
        num_splits=0,
    )

    def run() -> None:
        flash_attn_varlen_func(
            q=case.q,
            k=case.k,
            v=case.v,
            out=out,
            cu_seqlens_q=indptr,
            max_seqlen_q=shape.qo_len,
            seqused_k=case.lengths,
            max_seqlen_k=longest,
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            window_size=window,
            block_table=case.table,
            scheduler_metadata=metadata,
            fa_version=3,
            num_splits=0,
        )

    return run


def graph_of(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A captured launch, warmed up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph


def medians(graphs: Mapping[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, float]:
    """Microseconds of each, in turn, the L2 flushed before each replay."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}


def driver() -> str:
    """The version of the card's driver, as nvidia-smi says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", help="the commit measured, where the copy has no history")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_decode: expected a CUDA device")
    rows = []
    for name, shape in SHAPES.items():
        if options.rows not in name:
            continue
        case = Case(shape)
        error = case.check()
        graphs = {"ours": graph_of(case.run)}
        peer = flash_attention_3(case)
        if peer is not None:
            graphs["FA3"] = graph_of(peer)
        times = medians(graphs, options.repeats)
        ours = times.pop("ours")
        detail = {"error": error, "tb_per_s": case.bytes_read / ours / 1e6, "bytes": case.bytes_read}
        ratio = ours / min(times.values()) if times else None
        rows.append(Row(name, ours, "us", times, ratio, Target("ratio", shape.target), detail))
        print(rows[-1].row, f"{ours:.1f} us", times, f"{detail['tb_per_s']:.2f} TB/s", flush=True)
        del case, graphs, peer
    device = torch.cuda.get_device_properties(0)
    publish(
        "gpu_decode",
        rows,
        options.json,
        peers=["vllm"],
        more={
            "card": device.name,
            "driver": driver(),
            "cuda": torch.version.cuda,
            "peers_missing": [] if rows and rows[0].peers else ["FA3"],
        },
        measured=options.commit,
    )


if __name__ == "__main__":
    main()
