"""Layouts and plans of steps on a GPU: made there from what lies there, and kept where captured graphs read them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from attnloom.backends.vllm.impl import AttnloomImpl
from attnloom.core.block_mask import BlockMask
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.plan import Plan


class DeviceSteps:
    """What one builder keeps on its GPU between steps.

    vLLM replays a step's graph after it has built the step's metadata, outside the graph. The graph reads the plan at
    the address that it was captured with, and what the layout points to: vLLM's own buffers, which stay where they are,
    and the starts of rows, which are kept here.

    Args:
        page_size: KV tokens of a page.
        device: the GPU.
    """

    def __init__(self, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self._starts: dict[int, list[Tensor]] = {}
        self._captured: dict[tuple[Hashable, ...], Plan] = {}

    def layout(self, page_table: Tensor, lengths: Tensor) -> BlockSparseLayout:
        """As :func:`attnloom.adapters.page_table.paged_layout`, without anything new on the GPU.

        Args:
            page_table: int32 [>= requests, pages], any row stride.
            lengths: int32 [requests].
        """
        rows, columns = lengths.shape[0], page_table.shape[1]
        pitch = page_table.stride(0)
        made = self._starts.setdefault(pitch, [])
        if not made or made[-1].shape[0] < rows:
            # Graphs that were captured with the shorter ones read those: they stay.
            room = max(256, 1 << max(rows - 1, 0).bit_length())
            made.append(torch.arange(room, dtype=torch.int64, device=self.device) * pitch)
        span = (rows - 1) * pitch + columns if rows and columns else 0
        indices = page_table.as_strided((span,), (1,))
        return BlockSparseLayout(self.page_size, made[-1][:rows], lengths, indices)

    def plan(
        self,
        impl: AttnloomImpl,
        key: Hashable,
        common: Any,
        layout: BlockSparseLayout,
        block_mask: BlockMask | None,
        capture: bool,
    ) -> Plan:
        """The plan of a step for one plan key; nothing is read back.

        Args:
            impl: a layer with that key.
            key: of the plan.
            common: vLLM's CommonAttentionMetadata.
            layout: of the step.
            block_mask: KV tiles to skip.
            capture: whether the step is to be captured. Later steps of the same shape go into its buffer.
        """
        tokens, requests = common.num_actual_tokens, common.num_reqs
        shape = (key, common.causal, requests, tokens)
        plan = impl.engines[common.causal].plan(
            common.query_start_loc[: requests + 1],
            layout,
            total_q=tokens,
            max_q=common.max_query_len or None,
            params=impl.params(),
            block_mask=block_mask,
            into=self._captured.get(shape),
        )
        if capture:
            # The first one stays: with it, all that the graph reads.
            self._captured.setdefault(shape, plan)
        return plan
