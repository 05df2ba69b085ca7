"""The tensors of a row, and float64 attention of some of its queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gpu.rows import SEED, Shape

REQUESTS_CHECKED, QUERIES_CHECKED = 6, 32
FP8_K_SCALE = 0.5


class Runner(NamedTuple):
    """Someone's attention of a case, planned: ``run`` launches on the current stream and fills ``out``."""

    run: Callable[[], object]
    out: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A row's batch on a device; pages lie in random order.

    Attributes:
        shape: the row.
        kv_lens, qo_indptr: int32 ``[R]``, ``[R + 1]`` on the host.
        page_indptr: int32 ``[R + 1]`` on the host, where each request's pages begin in ``page_ids``.
        page_ids: int32 ``[total pages]``.
        table: int32 ``[R, most pages]``, the same as a page table, 0 past a request's end.
        lengths: kv_lens on the device.
        q: ``[total_q, num_qo_heads, head_dim]`` bfloat16.
        k, v: ``[total pages, page_size, num_kv_heads, head_dim]``.
        k_scale, v_scale: what the caches are to be multiplied by.
    """

    shape: Shape
    kv_lens: Tensor
    qo_indptr: Tensor
    page_indptr: Tensor
    page_ids: Tensor
    table: Tensor
    lengths: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: float
    v_scale: float

    @classmethod
    def create(cls, shape: Shape, device: str = "cuda") -> Case:
        """Fresh random tensors."""
        kv_lens = torch.tensor(shape.kv_lens, dtype=torch.int32)
        qo_indptr = torch.zeros(len(shape.qo_lens) + 1, dtype=torch.int32)
        qo_indptr[1:] = torch.tensor(shape.qo_lens).cumsum(0)
        pages = (kv_lens + shape.page_size - 1) // shape.page_size
        page_indptr = torch.zeros_like(qo_indptr)
        page_indptr[1:] = pages.cumsum(0)
        total = int(page_indptr[-1])
        page_ids = torch.randperm(total).to(torch.int32)
        table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for row, part in zip(table, page_ids.split(pages.tolist()), strict=True):
            row[: part.shape[0]] = part
        cache = (total, shape.page_size, shape.num_kv_heads, shape.head_dim)
        k, v = (torch.randn(cache, device=device, dtype=torch.bfloat16) for _ in range(2))
        k_scale = FP8_K_SCALE if shape.fp8_kv else 1.0
        if shape.fp8_kv:
            k, v = ((k / k_scale).to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))
        q = torch.randn(shape.total_q, shape.num_qo_heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        on_device = (page_ids.to(device), table.to(device), kv_lens.to(device))
        return cls(shape, kv_lens, qo_indptr, page_indptr, *on_device, q, k, v, k_scale, 1.0)

    @property
    def sm_scale(self) -> float:
        """Factor of q . k."""
        return float(self.shape.head_dim**-0.5)

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor]:
        """Row numbers of the queries that are checked, and their attention in float64.

        They are queries of the longest and the shortest request and some others, first and last queries among them.
        """
        shape = self.shape
        draw = torch.Generator().manual_seed(SEED)
        order = self.kv_lens.argsort().tolist()
        others = torch.randperm(len(order), generator=draw).tolist()
        rows, expected = [], []
        for request in list(dict.fromkeys([order[-1], order[0], *others]))[:REQUESTS_CHECKED]:
            qo, first = shape.qo_lens[request], int(self.qo_indptr[request])
            drawn = torch.randperm(qo, generator=draw)[:QUERIES_CHECKED].tolist()
            queries = torch.tensor(sorted({0, qo - 1, *drawn}))
            rows.append(queries + first)
            expected.append(self._attention(request, queries.to(self.q.device)))
        return torch.cat(rows).to(self.q.device), torch.cat(expected)

    def _attention(self, request: int, queries: Tensor) -> Tensor:
        shape = self.shape
        qo, kv = shape.qo_lens[request], shape.kv_lens[request]
        pages = self.page_ids[int(self.page_indptr[request]) : int(self.page_indptr[request + 1])].long()
        # float8 tensors have no indexing: their bytes have.
        k, v = (
            cache.view(torch.uint8)[pages].view(cache.dtype).reshape(-1, shape.num_kv_heads, shape.head_dim)[:kv]
            for cache in (self.k, self.v)
        )
        q = self.q[int(self.qo_indptr[request]) + queries].double()
        q = q.view(len(queries), shape.num_kv_heads, -1, shape.head_dim)
        scores = torch.einsum("qhgd,khd->qhgk", q, k.double()) * (self.sm_scale * self.k_scale)
        position = queries[:, None] + (kv - qo)
        key = torch.arange(kv, device=queries.device)[None, :]
        seen = key <= position
        if shape.window is not None:
            seen &= key > position - shape.window
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        out = torch.einsum("qhgk,khd->qhgd", scores.softmax(-1), v.double()) * self.v_scale
        return out.reshape(len(queries), shape.num_qo_heads, shape.head_dim)

    def error(self, out: Tensor) -> float:
        """Relative error of an output against float64; infinite where a row was not written."""
        if bool(out.isnan().any()):
            return math.inf
        rows, expected = self.reference
        return float((out[rows].double() - expected).norm() / expected.norm())
