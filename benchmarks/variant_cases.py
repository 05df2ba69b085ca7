"""The variants that variants.py measures, each in attnloom's spelling and in FlexAttention's, and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnloom import Attention, BlockSparseLayout, Variant, append_kv, mask_mod, score_mod
from attnloom.core.masks import pack_masks
from attnloom.core.variants import ALiBi, Causal, Full, PackedMask, SlidingWindow, SoftCap

Mod = Callable[..., Any]
PAGE = 128
WINDOW = 256
QO_HEADS, KV_HEADS = 8, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Requests of one shape: ``qo_len`` new tokens each on ``kv_len`` in all."""

    phase: str
    requests: int
    qo_len: int
    kv_len: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.phase} {self.requests}x{self.kv_len} {QO_HEADS}/{KV_HEADS} d{self.head_dim} {self.dtype}"


@dataclass(frozen=True)
class Spelled:
    """One attention in both spellings; mods are over logical positions, the last query's at the last key.

    Attributes:
        variant: attnloom's.
        params: its parameters, for run().
        score_mod, mask_mod: FlexAttention's.
    """

    variant: Variant
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _full(shape: Shape) -> Spelled:
    return Spelled(Full())


def _causal(shape: Shape) -> Spelled:
    return Spelled(Causal(), mask_mod=causal)


def _window(shape: Shape) -> Spelled:
    return Spelled(SlidingWindow(WINDOW), mask_mod=lambda b, h, q, k: (q >= k) & (q - k < WINDOW))


def _soft_cap(shape: Shape) -> Spelled:
    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 5.0 * torch.tanh(score / 5.0)

    return Spelled(SoftCap() & Causal(), mod, causal, {"logit_cap": 5.0})


def _alibi(shape: Shape) -> Spelled:
    slopes = torch.exp2(-torch.arange(1, QO_HEADS + 1, dtype=torch.float32))

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    return Spelled(ALiBi() & Causal(), mod, causal, {"alibi_slopes": slopes})


def _packed(shape: Shape) -> Spelled:
    """Nine keys of ten, at random, under the diagonal: no tile is hidden by more than causality."""
    generator = torch.Generator().manual_seed(1)
    diagonal = shape.kv_len - shape.qo_len
    masks = (torch.rand(shape.requests, shape.qo_len, shape.kv_len, generator=generator) < 0.9).tril(diagonal)
    packed = pack_masks(list(masks))
    return Spelled(
        PackedMask() & Causal(), mask_mod=lambda b, h, q, k: masks[b, q - diagonal, k] & (q >= k), params=packed
    )


def _traced(scores: Mod | None = None, mask: Mod | None = None) -> Spelled:
    """The same Python functions on both sides, under a causal mask."""
    parts = [*([score_mod(scores)] if scores else []), *([mask_mod(mask)] if mask else [])]
    variant = parts[0] & Causal()
    for part in parts[1:]:
        variant = variant & part
    return Spelled(variant, scores, (lambda b, h, q, k: (q >= k) & mask(b, h, q, k)) if mask else causal)


def _relative(shape: Shape) -> Spelled:
    table = torch.randn(QO_HEADS, 129, generator=torch.Generator().manual_seed(2))

    def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[h, torch.clamp(q - k, 0, 128)]

    return _traced(relative)


def _temperature(shape: Shape) -> Spelled:
    temperature = torch.linspace(0.5, 1.5, QO_HEADS)

    def per_head(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * temperature[h]

    return _traced(per_head)


def _root_alibi(shape: Shape) -> Spelled:
    slopes = torch.exp2(-torch.arange(1, QO_HEADS + 1, dtype=torch.float32))

    def root_alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - slopes[h] * torch.sqrt((q - k).abs().float())

    return _traced(root_alibi)


def documents(bounds: list[int]) -> Mod:
    """Keys of the query's own document; ``bounds`` are the documents' ends."""
    length = bounds[-1]
    ids = torch.bucketize(torch.arange(length), torch.tensor(bounds), right=True).int()

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[q] == ids[k]

    return document


def _document(shape: Shape) -> Spelled:
    length = shape.kv_len
    return _traced(mask=documents([length * 3 // 16, length * 7 // 16, length]))


def _prefix_lm(shape: Shape) -> Spelled:
    prefix = shape.kv_len // 3

    def prefix_lm(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) | (k < prefix)

    return Spelled(mask_mod(prefix_lm), mask_mod=prefix_lm)


def _chunked(shape: Shape) -> Spelled:
    def chunked(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q // 200 == k // 200

    return _traced(mask=chunked)


CASES: dict[str, Callable[[Shape], Spelled]] = {
    "full": _full,
    "causal": _causal,
    f"sliding window {WINDOW}": _window,
    "soft cap": _soft_cap,
    "ALiBi": _alibi,
    "packed mask": _packed,
    "document mask, traced": _document,
    "prefix LM, traced": _prefix_lm,
    "chunked local, traced": _chunked,
    "relative table, traced": _relative,
    "temperature, traced": _temperature,
    "square-root ALiBi, traced": _root_alibi,
}
# One query of each request: what only masks long stretches of queries is a prefill's.
DECODES = (
    "full",
    f"sliding window {WINDOW}",
    "soft cap",
    "ALiBi",
    "relative table, traced",
    "square-root ALiBi, traced",
)


class Problem:
    """Tensors of a shape: queries, and keys and values in pages that lie in no order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]
        generator = torch.Generator().manual_seed(0)

        def random(tokens: int, heads: int) -> Tensor:
            return torch.randn(shape.requests * tokens, heads, shape.head_dim, generator=generator).to(self.dtype)

        self.q = random(shape.qo_len, QO_HEADS)
        self.k, self.v = random(shape.kv_len, KV_HEADS), random(shape.kv_len, KV_HEADS)
        pages = -(-shape.kv_len // PAGE)
        self.table = torch.randperm(shape.requests * pages, generator=generator).int().view(shape.requests, pages)
        self.lengths = torch.full((shape.requests,), shape.kv_len, dtype=torch.int32)
        self.indptr = torch.arange(shape.requests + 1, dtype=torch.int32) * shape.qo_len

    @cached_property
    def cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values, as vLLM's cache of a layer on a CPU has them: [pages, kv_heads, page, 2 * head_dim]."""
        shape = self.shape
        whole = torch.zeros(self.table.numel(), KV_HEADS, PAGE, 2 * shape.head_dim, dtype=self.dtype)
        keys, values = whole.transpose(1, 2).split(shape.head_dim, dim=3)
        token = torch.arange(shape.kv_len)
        append_kv(self.k, self.v, keys, values, (self.table[:, token // PAGE].long() * PAGE + token % PAGE).flatten())
        return keys, values

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as FlexAttention takes them: [requests, heads, tokens, head_dim], contiguous."""
        return tuple(  # type: ignore[return-value]
            x.unflatten(0, (self.shape.requests, -1)).transpose(1, 2).contiguous() for x in (self.q, self.k, self.v)
        )

    def step(self, spelled: Spelled, *, block_mask: bool = True) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
        """(a step: layout, plan, run; its plan). ``block_mask``: use one where the mask is over positions."""
        engine = Attention(QO_HEADS, KV_HEADS, self.shape.head_dim, dtype=self.dtype, variant=spelled.variant)
        keys, values = self.cache
        out = torch.empty_like(self.q)
        mask = None
        # Once for a model, as FlexAttention's BlockMask.
        if block_mask and spelled.variant.logits_mask and "packed_mask" not in spelled.params:
            mask = engine.block_mask(self.shape.kv_len)
        ranges = {"params": spelled.params} if spelled.variant.visible else {}

        def plan() -> Any:
            layout = BlockSparseLayout.from_page_table(self.table, self.lengths, PAGE)
            return engine.plan(self.indptr, layout, block_mask=mask, **ranges)

        def step() -> Tensor:
            return engine.run(plan(), self.q, keys, values, params=spelled.params or None, out=out)

        return step, plan

    def expected(self, spelled: Spelled) -> Tensor:
        """[requests, qo_heads, qo_len, head_dim] in float64, from the mods themselves."""
        q, k, v = (x.double() for x in self.dense())
        shape, group = self.shape, QO_HEADS // KV_HEADS
        rows = torch.arange(shape.kv_len - shape.qo_len, shape.kv_len)[:, None]
        columns = torch.arange(shape.kv_len)[None]
        out = torch.empty_like(q)
        for b in range(shape.requests):
            for h in range(QO_HEADS):
                logits = q[b, h] @ k[b, h // group].T * shape.head_dim**-0.5
                at = (torch.tensor(b), torch.tensor(h), rows, columns)
                if spelled.score_mod is not None:
                    logits = spelled.score_mod(logits, *at)
                if spelled.mask_mod is not None:
                    logits = logits.masked_fill(~spelled.mask_mod(*at), -torch.inf)
                out[b, h] = logits.softmax(-1) @ v[b, h // group]
        return out
