"""The variants that are measured, each in attnloom's spelling and in FlexAttention's, and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnloom import Attention, BlockSparseLayout, Variant, append_kv, mask_mod, score_mod, variants
from attnloom.core.masks import pack_masks
from attnloom.core.variants import Causal

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

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.kv_len - self.qo_len

    def __str__(self) -> str:
        return f"{self.phase} {self.requests}x{self.kv_len} {QO_HEADS}/{KV_HEADS} d{self.head_dim} {self.dtype}"


@dataclass(frozen=True)
class Spelled:
    """One attention in both spellings; mods are over logical positions, the last query's at the last key.

    Attributes:
        variant: attnloom's.
        params: its parameters, for run().
        score_mod, mask_mod: FlexAttention's.
        rotate: what FlexAttention leaves to its caller: (rows [..., tokens, head_dim], position of the first) -> rows.
        adapt: the layout and the parameters of a step, from a whole layout.
        block_mask: skip tiles by a block mask, where the variant declares no range.
    """

    variant: Variant
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    rotate: Callable[[Tensor, int], Tensor] | None = None
    adapt: Callable[[BlockSparseLayout], tuple[BlockSparseLayout, Mapping[str, Any]]] | None = None
    block_mask: bool = False


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _full(shape: Shape) -> Spelled:
    return Spelled(variants.Full())


def _causal(shape: Shape) -> Spelled:
    return Spelled(Causal(), mask_mod=causal)


def _window(shape: Shape) -> Spelled:
    return Spelled(variants.SlidingWindow(WINDOW), mask_mod=lambda b, h, q, k: (q >= k) & (q - k < WINDOW))


def _chunked(shape: Shape) -> Spelled:
    return Spelled(variants.ChunkedLocal(200), mask_mod=lambda b, h, q, k: (q // 200 == k // 200) & (q >= k))


def _prefix_lm(shape: Shape) -> Spelled:
    lengths = (torch.arange(shape.requests) + 1).int() * (shape.kv_len // (2 * shape.requests))
    params = {"prefix_lengths": lengths}
    return Spelled(variants.PrefixLM(), mask_mod=lambda b, h, q, k: (k <= q) | (k < lengths[b]), params=params)


def _documents(shape: Shape) -> Spelled:
    return document_masks(shape, [shape.kv_len * part // 16 for part in (3, 4, 9)])


def document_masks(shape: Shape, lengths: list[int], *, declared: bool = True) -> Spelled:
    """Documents of these lengths in every request; by the catalogue, or by the mask_mod and its block mask."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()

    def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[q] == ids[k]

    variant = variants.DocumentMask() if declared else mask_mod(same_document)
    params = variants.documents([lengths] * shape.requests) if declared else {}
    return Spelled(
        variant & Causal(),
        mask_mod=lambda b, h, q, k: same_document(b, h, q, k) & (q >= k),
        params=params,
        block_mask=not declared,
    )


def _packed(shape: Shape) -> Spelled:
    """Nine keys of ten, at random, under the diagonal: no tile is hidden by more than causality."""
    generator = torch.Generator().manual_seed(1)
    masks = (torch.rand(shape.requests, shape.qo_len, shape.kv_len, generator=generator) < 0.9).tril(shape.first)
    return Spelled(
        variants.PackedMask() & Causal(),
        mask_mod=lambda b, h, q, k: masks[b, q - shape.first, k] & (q >= k),
        params=pack_masks(list(masks)),
    )


def _streaming(shape: Shape) -> Spelled:
    sinks = 4

    def adapt(layout: BlockSparseLayout) -> tuple[BlockSparseLayout, Mapping[str, Any]]:
        return variants.streaming(layout, [shape.qo_len] * shape.requests, sinks, WINDOW)

    return Spelled(
        variants.StreamingLLM(sinks, WINDOW),
        mask_mod=lambda b, h, q, k: (q >= k) & ((q - k < WINDOW) | (k < sinks)),
        adapt=adapt,
    )


def _soft_cap(shape: Shape) -> Spelled:
    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 5.0 * torch.tanh(score / 5.0)

    return Spelled(variants.SoftCap(5.0) & Causal(), mod, causal)


def _grok(shape: Shape) -> Spelled:
    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        capped = 30.0 * torch.tanh(score / 30.0)
        return torch.where(q > 512, capped * (torch.log2(torch.clamp(q, min=1).float()) / 9.0), capped)

    return Spelled(variants.SoftCap(30.0) & variants.GrokTemperature(512) & Causal(), mod, causal)


def _alibi(shape: Shape) -> Spelled:
    slopes = _slopes()

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    return Spelled(variants.ALiBi() & Causal(), mod, causal, {"alibi_slopes": slopes})


def _alibi_sqrt(shape: Shape) -> Spelled:
    slopes = _slopes()

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - slopes[h] * torch.sqrt(torch.clamp(q - k, min=0).float())

    return Spelled(variants.ALiBiSqrt() & Causal(), mod, causal, {"alibi_slopes": slopes})


def _slopes() -> Tensor:
    return torch.exp2(-torch.arange(1, QO_HEADS + 1, dtype=torch.float32))


def _relative(shape: Shape) -> Spelled:
    table = torch.randn(QO_HEADS, 257, generator=torch.Generator().manual_seed(2))

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[h, torch.clamp(k - q, -128, 128) + 128]

    return Spelled(variants.RelativeBias() & Causal(), mod, causal, {"relative_bias": table})


def _relative_traced(shape: Shape) -> Spelled:
    mod = _relative(shape).score_mod
    assert mod is not None
    return Spelled(score_mod(mod, "relative") & Causal(), mod, causal)


def _temperature(shape: Shape) -> Spelled:
    temperature = torch.linspace(0.5, 1.5, QO_HEADS)

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score / temperature[h]

    return Spelled(variants.HeadTemperature() & Causal(), mod, causal, {"temperature": temperature})


def _rope(shape: Shape) -> Spelled:
    frequencies = variants.rope_frequencies(shape.head_dim)
    half = shape.head_dim // 2

    def rotate(rows: Tensor, first: int) -> Tensor:
        wide = rows if rows.dtype == torch.float64 else rows.float()
        angles = (torch.arange(rows.shape[-2], dtype=wide.dtype) + first)[:, None] * frequencies.to(wide.dtype)
        cos, sin = angles.cos(), angles.sin()
        low, high = wide[..., :half], wide[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(rows.dtype)

    return Spelled(variants.RoPE(shape.head_dim) & Causal(), mask_mod=causal, rotate=rotate)


CASES: dict[str, Callable[[Shape], Spelled]] = {
    "full": _full,
    "causal": _causal,
    f"sliding window {WINDOW}": _window,
    "chunked local": _chunked,
    "prefix LM": _prefix_lm,
    "document mask": _documents,
    "packed mask": _packed,
    "soft cap": _soft_cap,
    "Grok's cap and temperature": _grok,
    "ALiBi": _alibi,
    "ALiBi, square root": _alibi_sqrt,
    "relative bias": _relative,
    "relative bias, traced": _relative_traced,
    "head temperature": _temperature,
    "RoPE": _rope,
    "StreamingLLM": _streaming,
}
# One query of each request, at its end: masks that shape a prefill say nothing there. StreamingLLM drops pages that a
# prefill needs.
PREFILLS = [case for case in CASES if case != "StreamingLLM"]
DECODES = [
    case
    for case in CASES
    if case not in ("causal", "chunked local", "prefix LM", "document mask", "packed mask", "relative bias, traced")
]


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

    def step(self, spelled: Spelled) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
        """(a step: layout, plan, run; its plan)."""
        engine = Attention(QO_HEADS, KV_HEADS, self.shape.head_dim, dtype=self.dtype, variant=spelled.variant)
        keys, values = self.cache
        out = torch.empty_like(self.q)
        # Made once, as FlexAttention's BlockMask is: what the mask says of a step of these lengths.
        mask = engine.block_mask(self.shape.kv_len) if spelled.block_mask else None
        params, adapted = spelled.params, None
        if spelled.adapt is not None:
            adapted, params = spelled.adapt(BlockSparseLayout.from_page_table(self.table, self.lengths, PAGE))

        def plan() -> Any:
            layout = adapted or BlockSparseLayout.from_page_table(self.table, self.lengths, PAGE)
            return engine.plan(self.indptr, layout, block_mask=mask, params=params or None)

        def step() -> Tensor:
            return engine.run(plan(), self.q, keys, values, params=params or None, out=out)

        return step, plan

    def expected(self, spelled: Spelled) -> Tensor:
        """[requests, qo_heads, qo_len, head_dim] in float64, from the mods themselves."""
        q, k, v = (x.double() for x in self.dense())
        shape, group = self.shape, QO_HEADS // KV_HEADS
        if spelled.rotate is not None:
            q, k = spelled.rotate(q, shape.first), spelled.rotate(k, 0)
        rows = torch.arange(shape.first, shape.kv_len)[:, None]
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
