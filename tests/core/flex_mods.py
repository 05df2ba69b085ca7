"""Score mods and mask mods as users write them for FlexAttention: closures, factories, partials, modules, objects.

Shapes: BATCH requests of LENGTH tokens, NUM_QO_HEADS query heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

BATCH, LENGTH, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 150, 6, 2, 64

Mod = Callable[..., Any]
SCORE_MODS: dict[str, Mod] = {}
MASK_MODS: dict[str, Mod] = {}


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _score(name: str) -> Callable[[Mod], Mod]:
    return lambda mod: SCORE_MODS.setdefault(name, mod)


def _mask(name: str) -> Callable[[Mod], Mod]:
    return lambda mod: MASK_MODS.setdefault(name, mod)


@_score("causal by -inf")
def causal(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


@_score("relative")
def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx - kv_idx) / 64


@_score("checkerboard")
def checkerboard(score: Any, batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    score = torch.where(torch.abs(token_kv - token_q) == 1, score * 0.5, score)
    return torch.where((token_q - token_kv) % 3 == 1, score * 2.0, score)


def generate_alibi_bias(num_heads: int) -> Mod:
    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        scale = torch.exp2(-((h + 1) * 8.0 / num_heads))
        return score + (kv_idx - q_idx) * scale

    return alibi


SCORE_MODS["alibi computed"] = generate_alibi_bias(NUM_QO_HEADS)


def generate_slopes(slopes: torch.Tensor) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score - torch.sqrt((q_idx - kv_idx).abs().float()) * slopes[h]


SCORE_MODS["slopes, square root"] = generate_slopes(_randn(NUM_QO_HEADS, seed=1).abs())


def generate_tanh_softcap(soft_cap: int) -> Mod:
    def tanh_softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return soft_cap * torch.tanh(score / soft_cap)

    return tanh_softcap


SCORE_MODS["soft cap"] = generate_tanh_softcap(3)

CAP = torch.tensor(2.5)


@_score("soft cap by a captured number, causal")
def captured_cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (CAP * (score / CAP).tanh()).masked_fill(q < k, float("-inf"))


class RelativeBias(torch.nn.Module):
    """A table over clipped distances, as a module with a parameter."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest
        self.table = torch.nn.Parameter(_randn(NUM_QO_HEADS, 2 * largest + 1, seed=2))

    def forward(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.clamp(kv_idx - q_idx, -self.largest, self.largest)
        return score + self.table[h, distance + self.largest]


SCORE_MODS["relative table, a module"] = RelativeBias(20)


def t5(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, buckets: int, table: torch.Tensor) -> Any:
    half = buckets // 2
    distance = kv_idx - q_idx
    side = (distance > 0).to(torch.long) * half
    far = torch.abs(distance)
    exact = half // 2
    # The offset keeps the logarithm off the edges of buckets, where float32 and float64 may differ.
    grown = exact + (torch.log(far.clamp(min=1) / exact + 1e-3) / math.log(64 / exact) * (half - exact)).to(torch.long)
    bucket = side + torch.where(far < exact, far, torch.minimum(grown, torch.full_like(grown, half - 1)))
    return score + table[bucket, h]


SCORE_MODS["T5 buckets, a partial"] = functools.partial(t5, buckets=16, table=_randn(16, NUM_QO_HEADS, seed=3))


def generate_full_bias(bias: torch.Tensor) -> Mod:
    def full_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * 0.5 + bias[b, h][q_idx][kv_idx]

    return full_bias


SCORE_MODS["bias of all indices, a bfloat16 view"] = generate_full_bias(
    _randn(LENGTH, BATCH, NUM_QO_HEADS, LENGTH, seed=4).bfloat16().permute(1, 2, 0, 3)
)


@_score("by head and parity")
def by_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    near = (q_idx // 7 == kv_idx // 7) & (h % 2 == 0) | (kv_idx & 1).bool() & ~(h < 3)
    return torch.where(near, torch.maximum(score, torch.zeros_like(score)), torch.sigmoid(score) * 3 - b)


PROBABILITIES = torch.linspace(0.05, 0.95, LENGTH, dtype=torch.float64)


@_score("log probability, exp, sin, pow")
def functions(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    gate = torch.log(PROBABILITIES[kv_idx]) + 0.1 * torch.sin(q_idx * 0.05) - torch.exp(-(h + 1.0))
    return score + gate + 0.01 * torch.abs(score) ** 1.5 - 2.0 ** -(h + b) + torch.rsqrt(1.0 + kv_idx)


@_mask("causal")
def causal_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def generate_sliding_window(window_size: int) -> Mod:
    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= window_size

    return and_masks(sliding_window, causal_mask)


MASK_MODS["sliding window, and_masks"] = generate_sliding_window(33)


def generate_prefix_lm(prefix_length: torch.Tensor) -> Mod:
    def prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < prefix_length[b]

    return or_masks(prefix_mask, causal_mask)


MASK_MODS["prefix LM, or_masks"] = generate_prefix_lm(torch.tensor([40, 7], dtype=torch.int32))


def generate_doc_mask_mod(mask_mod: Mod, offsets: torch.Tensor) -> Mod:
    """Documents one after the other; inside each the given mask over positions of the document."""
    counts = offsets[1:] - offsets[:-1]
    document_id = torch.repeat_interleave(torch.arange(len(counts)), counts)

    def doc_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same_doc = document_id[q_idx] == document_id[kv_idx]
        q_logical = q_idx - offsets[document_id[q_idx]]
        kv_logical = kv_idx - offsets[document_id[kv_idx]]
        return same_doc & mask_mod(b, h, q_logical, kv_logical)

    return doc_mask_mod


MASK_MODS["documents"] = generate_doc_mask_mod(generate_sliding_window(20), torch.tensor([0, 30, 31, 90, LENGTH]))


def generate_natten(width: int, kernel: int) -> Mod:
    def natten(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_x, q_y = q_idx // width, q_idx % width
        kv_x, kv_y = kv_idx // width, kv_idx % width
        height = LENGTH // width
        center_x = q_x.clamp(kernel // 2, height - 1 - kernel // 2)
        center_y = q_y.clamp(kernel // 2, width - 1 - kernel // 2)
        return ((center_x - kv_x).abs() <= kernel // 2) & (torch.abs(center_y - kv_y) <= kernel // 2)

    return natten


MASK_MODS["neighbourhood in two dimensions"] = generate_natten(15, 5)


class Selected:
    """A boolean table, as an object with __call__."""

    def __init__(self) -> None:
        self.seen = _randn(BATCH, LENGTH, LENGTH, seed=5) > -0.5
        self.seen[:, ::11] = False

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.logical_and(self.seen[b, q_idx, kv_idx], torch.logical_or(h != 2, q_idx >= kv_idx))


MASK_MODS["a table, an object"] = Selected()


@_mask("dilated, from the end")
def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx - q_idx) // -3 * 3 == torch.div(q_idx - kv_idx, 1, rounding_mode="trunc")
