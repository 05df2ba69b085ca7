"""What the card gives to programs that do nothing but move bytes, multiply, or attend without paging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from gpu.peers import first_line
from gpu.rows import Shape
from gpu.timing import graph_of, median, replay_times
from gpu.vllm_peers import dense_flash_attention_3

COPY_BYTES, READ_BYTES, SIDE = 2 << 30, 4 << 30, 8192
DENSE = {"1 x 16384": (1, 16384), "16 x 2048": (16, 2048)}


@dataclass(frozen=True)
class Ceilings:
    """TB/s of a device copy (bytes read and written) and of a plain read; TFLOP/s of the rest.

    Attributes:
        launch_us: of a graph with one kernel that writes one element, timed like a row.
        gemm_tflop_per_s: of an 8192^3 bf16 product of random matrices.
        dense_fa3_tflop_per_s: FA3 without paging, causal, 32/8 heads of 128, by batch; the fastest way of
            calling it; empty where it is missing.
    """

    copy_tb_per_s: float
    read_tb_per_s: float
    gemm_tflop_per_s: float
    dense_fa3_tflop_per_s: dict[str, float]
    launch_us: float

    def floor_us(self, shape: Shape) -> float:
        """The least time of a row: a launch, and its KV at the rate of a plain read or its products at a GEMM's."""
        return self.launch_us + max(shape.kv_bytes / self.read_tb_per_s, shape.flops / self.gemm_tflop_per_s) / 1e6

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure(repeats: int) -> tuple[Ceilings, dict[str, str]]:
    """The ceilings, and why those that are missing are."""
    dense, reasons = {}, {}
    for name, (requests, length) in DENSE.items():
        try:
            ways = dense_flash_attention_3(requests, length, (32, 8), 128)
            time = min(_time(way, repeats) for way in ways)
        except Exception as error:
            reasons[f"dense FA3 {name}"] = first_line(error)
            continue
        lengths = (length,) * requests
        dense[name] = Shape(lengths, lengths, 16, 1.0).flops / time / 1e6
    found = Ceilings(
        copy_tb_per_s=2 * COPY_BYTES / _time(_copy(), repeats) / 1e6,
        read_tb_per_s=READ_BYTES / _time(_read(), repeats) / 1e6,
        gemm_tflop_per_s=2 * SIDE**3 / _time(_gemm(), repeats) / 1e6,
        dense_fa3_tflop_per_s=dense,
        launch_us=_time(torch.zeros(1, device="cuda").zero_, repeats),
    )
    return found, reasons


def _time(function: Callable[[], object], repeats: int) -> float:
    return median(replay_times({"": graph_of(function)}, repeats)[""])


def _copy() -> Callable[[], object]:
    # A kernel: as a node of a graph, a memcpy of this size reached 2.8 TB/s on an H200.
    source = torch.randint(-(2**31), 2**31, (COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target)


def _read() -> Callable[[], object]:
    source = torch.randn(READ_BYTES // 4, device="cuda")
    total = torch.empty((), device="cuda")
    return lambda: torch.sum(source, dim=0, out=total)


def _gemm() -> Callable[[], object]:
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)
