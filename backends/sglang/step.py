"""What a step hands to its layers: which queries there are, where their KV lies, and plans, made once a plan key."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from attnloom import Attention, Plan
from attnloom.adapters.token_table import TokenTable
from attnloom.core.layout import BlockSparseLayout


class Pool(Enum):
    """Which keys a layer reads."""

    FULL = "its own, in the pool of all tokens"
    WINDOWED = "its own, in the pool of windowed layers"
    ENCODER = "those of the encoder"


@dataclass
class Step:
    """One forward pass. Its tensors lie where the token table lies; nothing is copied to the host.

    Attributes:
        qo_indptr: int32 ``[requests + 1]``: where each request's queries begin.
        total_q: on a GPU, a number on the host: at least the last of ``qo_indptr``. None on a CPU.
        most: queries of a request, at most.
        rows: ``[requests]``, rows of the token table.
        kv_lens: int32 ``[requests]``, KV tokens of each request.
        extend: some requests may have several queries, in the order of their text.
        bound: there may be fewer queries than ``total_q``.
        tree: parameters of the mask among drafts; empty where there is none.
        encoder_lens: ``[requests]``, tokens of the encoder at the beginning of a row; None: the model has none.
        swa_locations: ``[tokens]``, where the step's keys go in the pool of windowed layers.
    """

    qo_indptr: Tensor
    total_q: int | None
    most: int
    rows: Tensor
    kv_lens: Tensor
    extend: bool
    bound: bool = False
    tree: dict[str, Tensor] = field(default_factory=dict)
    encoder_lens: Tensor | None = None
    layouts: dict[Pool, BlockSparseLayout] = field(default_factory=dict)
    plans: dict[tuple[Pool, Hashable], Plan] = field(default_factory=dict)
    swa_locations: Tensor | None = None

    def plan(self, pool: Pool, key: Hashable, engine: Attention, params: dict[str, Any]) -> Plan:
        """The plan of the layers with this key, made when it is first asked for."""
        plan = self.plans.get((pool, key))
        if plan is None:
            most = None if self.total_q is None else self.most or None
            plan = engine.plan(self.qo_indptr, self.layouts[pool], total_q=self.total_q, max_q=most, params=params)
            self.plans[pool, key] = plan
        return plan


class Steps:
    """Makes steps from SGLang's ForwardBatch; keeps what does not change from one to the next.

    On a GPU nothing waits for the device, and shapes follow from the batch's: a step may be made while a CUDA graph is
    captured, and every replay makes it anew from what SGLang's buffers hold then.
    """

    def __init__(self, table: Tensor, max_requests: int, page_size: int = 1) -> None:
        """Args:
        table: int32 ``[table_rows, max_context]``, SGLang's ``req_to_token``.
        max_requests: of one step.
        page_size: tokens of a page, from column 0 of a row on, whose slots are consecutive.
        """  # noqa: D205
        self.table = TokenTable.of(table)
        self.page_size = page_size
        self.on_device = table.device.type != "cpu"
        self.one_each = torch.arange(max_requests + 1, dtype=torch.int32, device=table.device)

    def of(self, batch: Any) -> Step:
        """The step of a batch of any kind, without its mask among drafts."""
        if batch.forward_mode.is_decode():
            return self.decode(batch)
        if batch.forward_mode.is_target_verify():
            return self.verify(batch)
        return self.extend(batch)

    def decode(self, batch: Any) -> Step:
        """A query for each request."""
        return self._same(batch, 1)

    def verify(self, batch: Any) -> Step:
        """Drafts behind the text of each request, which the lengths do not count yet."""
        drafts = int(batch.spec_info.draft_token_num)
        chain = getattr(batch.spec_info, "topk", None) == 1
        return self._same(batch, drafts, more=drafts, extend=True, tree=not chain)

    def extend(self, batch: Any) -> Step:
        """The last tokens of each request are queries: prefill with and without a prefix, mixed steps, draft extend."""
        requests = batch.batch_size
        lens, host = getattr(batch, "extend_seq_lens", None), getattr(batch, "extend_seq_lens_cpu", None)
        if lens is None:  # SGLang's view of a batch of drafts whose graph it replays
            lens = batch.spec_info.extend_seq_lens_tensor
        if host is None and not self.on_device:
            host = lens.tolist()
        indptr = torch.zeros(requests + 1, dtype=torch.int32, device=self.one_each.device)
        torch.cumsum(lens[:requests], 0, out=indptr[1:], dtype=torch.int32)
        if host is not None:
            most, total = int(max(host[:requests])), int(sum(host[:requests]))
        else:
            most = total = int(batch.input_ids.shape[0])
        return self._step(batch, indptr, most, total, batch.seq_lens, extend=True, bound=host is None)

    def branches(self, batch: Any, branches: int, drafted: int) -> Step:
        """Several queries for each request; lengths do not count ``drafted`` keys, those of the queries included."""
        return self._same(batch, branches, more=drafted, tree=branches > 1)

    def _same(self, batch: Any, queries: int, *, more: int = 0, extend: bool = False, tree: bool = False) -> Step:
        """As many queries for each request; lengths do not count ``more`` keys."""
        requests = batch.batch_size
        if requests >= self.one_each.shape[0]:
            self.one_each = torch.arange(requests + 1, dtype=torch.int32, device=self.one_each.device)
        indptr = self.one_each[: requests + 1]
        if queries != 1:
            indptr = indptr * queries
        lengths = batch.seq_lens + more if more else batch.seq_lens
        return self._step(batch, indptr, queries, requests * queries, lengths, extend=extend, tree=tree)

    def _step(
        self,
        batch: Any,
        indptr: Tensor,
        most: int,
        total: int,
        lengths: Tensor,
        *,
        extend: bool,
        bound: bool = False,
        tree: bool = False,
    ) -> Step:
        requests = batch.batch_size
        rows, kv_lens = batch.req_pool_indices[:requests], lengths[:requests].to(torch.int32)
        encoder_lens = batch.encoder_lens
        step = Step(
            indptr,
            total if self.on_device else None,
            most,
            rows,
            kv_lens,
            extend,
            bound=bound,
            encoder_lens=encoder_lens,
        )
        page_size = self.page_size
        if tree:
            # Branches of a tree may have pages of their own, which repeat the end of the prefix. SGLang refuses trees
            # with pages for backends that it does not know.
            page_size = 1
        if encoder_lens is not None:
            # The text begins behind the encoder's tokens, in the middle of a page. And SGLang's alloc_for_decode takes
            # the slot before a new one from a column that does not count them: pages of 0.5.17 are none.
            page_size = 1
        step.layouts[Pool.FULL] = self.table.layout(rows, kv_lens, encoder_lens, page_size)
        if encoder_lens is not None:
            step.layouts[Pool.ENCODER] = self.table.layout(rows, encoder_lens.to(torch.int32))
        return step
