"""Steps on a GPU: layouts and plans from what lies there; nothing is read back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnloom.adapters.page_table import ragged_layout
from attnloom.backends.vllm.impl import AttnloomImpl
from attnloom.core.block_mask import BlockMask
from attnloom.core.layout import BlockSparseLayout, flat_table
from attnloom.core.plan import Plan
from attnloom.core.streams import capturing


def _in_graph(device: torch.device) -> bool:
    return device.type == "cuda" and capturing()


class RowStarts:
    """Where rows of page tables begin, on one GPU. Captured graphs read them: they stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, list[Tensor]] = {}

    def of(self, rows: int, pitch: int) -> Tensor:
        """int64 [rows]: multiples of ``pitch``."""
        made = self._made.setdefault(pitch, [])
        if made and made[-1].shape[0] >= rows:
            return made[-1][:rows]
        room = max(256, 1 << max(rows - 1, 0).bit_length())
        starts = torch.arange(room, dtype=torch.int64, device=self._device) * pitch
        if not _in_graph(self._device):  # else they are the graph's, which fills them when it is replayed
            made.append(starts)  # behind the shorter ones: graphs that were captured with those read them
        return starts[:rows]


@dataclass(eq=False)
class DeviceStep:
    """One step, as vLLM's buffers say when the stream gets there.

    Attributes:
        qo_indptr: int32 [>= requests + 1], where each request's queries begin.
        lengths: int32 [>= requests], KV tokens of each request.
        page_table: int32 [>= requests, pages], any row stride. None: KV is not in pages, but end to end as the queries.
        starts: int64 [requests], of the page table's rows.
        page_size: KV tokens of a page.
        requests, tokens: of the step, padding included.
        most: queries of a request, at most; 0: unknown.
    """

    qo_indptr: Tensor
    lengths: Tensor
    page_table: Tensor | None
    starts: Tensor | None
    page_size: int
    requests: int
    tokens: int
    most: int

    @classmethod
    def of(cls, common: Any, starts: RowStarts, page_size: int, in_pages: bool) -> DeviceStep:
        """From vLLM's CommonAttentionMetadata, whose fields its drafters assign to later."""
        requests, table = common.num_reqs, common.block_table_tensor if in_pages else None
        return cls(
            common.query_start_loc,
            common.seq_lens,
            table,
            None if table is None else starts.of(requests, table.stride(0)),
            page_size,
            requests,
            common.num_actual_tokens,
            common.max_query_len or 0,
        )

    @cached_property
    def layout(self) -> BlockSparseLayout:
        """Where the requests' KV lies. As ``adapters.page_table.paged_layout``, without anything new on the GPU."""
        table = self.page_table
        if table is None or self.starts is None:
            return ragged_layout(self.qo_indptr[: self.requests + 1], self.tokens)
        indices, _ = flat_table(table[: self.requests])
        return BlockSparseLayout(self.page_size, self.starts, self.lengths[: self.requests], indices)

    def plan(self, layer: AttnloomImpl, causal: bool, block_mask: BlockMask | None) -> Plan:
        """The plan of a layer, and of those with the same plan id."""
        return layer.engines[causal].plan(
            self.qo_indptr[: self.requests + 1],
            self.layout,
            total_q=self.tokens,
            max_q=self.most or None,
            params=layer.params(),
            block_mask=block_mask,
        )
