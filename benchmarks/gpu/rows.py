"""The batches that are measured: lengths, heads, page size, who has a figure there, and what ours is to reach."""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 0
DECODERS = ("FI fa2", "FI fa3", "FI persistent", "FI decode", "FA3", "Triton")
PREFILLERS = ("FI fa2", "FI fa3", "FI persistent", "FA3", "Triton")


@dataclass(frozen=True)
class Shape:
    """One row, causal.

    Attributes:
        kv_lens: KV tokens of each request, its new tokens included.
        qo_lens: new tokens of each request.
        page_size: tokens of a page.
        target: limit of ours / best peer.
        peers: who takes part.
        num_qo_heads, num_kv_heads, head_dim: of all requests.
        window: keys that a query sees, its own included; None: all before it.
        fp8_kv: whether the caches hold float8_e4m3fn; otherwise bfloat16, as queries and outputs always do.
    """

    kv_lens: tuple[int, ...]
    qo_lens: tuple[int, ...]
    page_size: int
    target: float
    peers: tuple[str, ...] = DECODERS
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    fp8_kv: bool = False

    @property
    def total_q(self) -> int:
        """New tokens of the batch."""
        return sum(self.qo_lens)

    @property
    def kv_bytes(self) -> int:
        """K and V that some query sees, each read once."""
        seen = 0
        for qo, kv in zip(self.qo_lens, self.kv_lens, strict=True):
            seen += kv if self.window is None else min(kv, self.window + qo - 1)
        return seen * self.num_kv_heads * self.head_dim * 2 * (1 if self.fp8_kv else 2)

    @property
    def reads(self) -> bool:
        """Whether reading KV is what takes time: far fewer operations a byte than any GPU has."""
        return self.flops < 50 * self.kv_bytes

    @property
    def flops(self) -> int:
        """Of the two products over visible (query, key) pairs, a multiply-add counted twice."""
        pairs = 0
        for qo, kv in zip(self.qo_lens, self.kv_lens, strict=True):
            first, last = kv - qo + 1, kv  # keys before and at the first and the last query
            full = last if self.window is None else min(last, self.window)  # queries below it see all of those
            growing = max(0, full - first + 1)
            pairs += growing * (first + full) // 2 + (qo - growing) * full
        return 4 * pairs * self.num_qo_heads * self.head_dim


def zipf(requests: int, mean: int) -> tuple[int, ...]:
    """Lengths proportional to 1 / rank, in an order drawn once and for all: a batch is not sorted by length."""
    weights = [1 / rank for rank in range(1, requests + 1)]
    lengths = [max(1, round(weight / sum(weights) * mean * requests)) for weight in weights]
    random.Random(SEED).shuffle(lengths)
    return tuple(lengths)


def uniform(requests: int, low: int, high: int) -> tuple[int, ...]:
    """Lengths drawn uniformly from low to high, the same every time."""
    draw = random.Random(SEED)
    return tuple(draw.randint(low, high) for _ in range(requests))


def decode(kv_lens: tuple[int, ...], page_size: int, target: float) -> Shape:
    """One new token a request."""
    return Shape(kv_lens, (1,) * len(kv_lens), page_size, target)


def prefill(lens: tuple[int, ...], page_size: int, target: float) -> Shape:
    """Nothing cached."""
    return Shape(lens, lens, page_size, target, PREFILLERS)


def mixed(target: float) -> Shape:
    """Four chunks of 1024 tokens among 124 decodes, in an order drawn once and for all."""
    requests = [(1024, 4096)] * 4 + [(1, 2048)] * 124
    random.Random(SEED).shuffle(requests)
    qo_lens, kv_lens = zip(*requests, strict=True)
    return Shape(kv_lens, qo_lens, 16, target, PREFILLERS)


ROWS = {
    "decode 64 x 4096 (16)": decode((4096,) * 64, 16, 1.01),
    "decode 1 x 131072 (16)": decode((131072,), 16, 0.95),
    "decode 16 x 16384 (16)": decode((16384,) * 16, 16, 1.01),
    "decode 256 x 1024 (16)": decode((1024,) * 256, 16, 0.98),
    "decode 64, Zipf, mean 4096 (16)": decode(zipf(64, 4096), 16, 0.90),
    "decode 64, Zipf, mean 4096 (1)": decode(zipf(64, 4096), 1, 0.91),
    "decode 128, U(512, 2048) (16)": decode(uniform(128, 512, 2048), 16, 0.97),
    "prefill 1 x 16384 (16)": prefill((16384,), 16, 0.96),
    "prefill 16 x 2048 (16)": prefill((2048,) * 16, 16, 0.90),
    "prefill 16 x 2048 (1)": prefill((2048,) * 16, 1, 0.95),
    "prefill 16, Zipf, mean 4096 (16)": prefill(zipf(16, 4096), 16, 0.88),
    "append 8 x (512 new + 8192) (16)": Shape((8704,) * 8, (512,) * 8, 16, 0.95, PREFILLERS),
    "mixed: 4 x (1024 new of 4096) + 124 decodes of 2048 (16)": mixed(0.80),
    "verify 64 x 4 drafts, 4096 (16)": Shape((4096,) * 64, (4,) * 64, 16, 1.01, PREFILLERS),
    "decode 64 x 4096, e4m3 KV (16)": Shape(
        (4096,) * 64, (1,) * 64, 16, 0.72, ("FI fa2", "FI persistent", "Triton"), fp8_kv=True
    ),
    "decode 128 x 2048, 64/8 heads, head_dim 64, window 128 (16)": Shape(
        (2048,) * 128, (1,) * 128, 16, 0.65, ("FI fa2", "FA3", "Triton"), 64, 8, 64, 128
    ),
}

# They need compositions, which the engine does not have yet.
LEFT_OUT = (
    "shared prefix 8192, 32 requests, 256 own (16)",
    "shared prefix 32768, 64 requests, 256 own (16)",
    "shared prefix 1024, 16 requests, 256 own (16)",
)

# Two rows of one batch, and the limit of the first's time over the second's.
PAGE_SIZES = {
    "decode, Zipf: page 1 over page 16": (
        "decode 64, Zipf, mean 4096 (1)",
        "decode 64, Zipf, mean 4096 (16)",
        1.04,
    ),
}
