"""What a step hands to its layers: which queries there are, where their KV lies, and plans, made once a plan key."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from attnloom import Attention, Plan
from attnloom.adapters.draft_tree import tail_masks
from attnloom.adapters.token_table import TokenTable
from attnloom.core.layout import BlockSparseLayout


class Pool(Enum):
    """Which keys a layer reads."""

    FULL = "its own, in the pool of all tokens"
    WINDOWED = "its own, in the pool of windowed layers"
    ENCODER = "those of the encoder"


@dataclass
class Step:
    """One forward pass.

    Attributes:
        qo_indptr: int32 ``[requests + 1]`` on the host: where each request's queries begin.
        rows: ``[requests]``, rows of the token table.
        kv_lens: int32 ``[requests]``, KV tokens of each request, on the device.
        host_kv_lens: the same or upper bounds, on the host; None: ``kv_lens`` are there.
        extend: some requests may have several queries, in the order of their text.
        tree: parameters of the mask among drafts; empty where there is none.
        encoder_lens: ``[requests]``, tokens of the encoder at the beginning of a row; None: the model has none.
    """

    qo_indptr: Tensor
    rows: Tensor
    kv_lens: Tensor
    host_kv_lens: Tensor | None
    extend: bool
    tree: dict[str, Tensor] = field(default_factory=dict)
    encoder_lens: Tensor | None = None
    layouts: dict[Pool, BlockSparseLayout] = field(default_factory=dict)
    plans: dict[tuple[Pool, Hashable], Plan] = field(default_factory=dict)
    swa_locations: Tensor | None = None

    @property
    def queries(self) -> int:
        """Query tokens; rows of q past them are padding."""
        return int(self.qo_indptr[-1])

    def plan(self, pool: Pool, key: Hashable, engine: Attention, params: dict[str, Any]) -> Plan:
        """The plan of the layers with this key, made when the first of them asks."""
        plan = self.plans.get((pool, key))
        if plan is None:
            # The encoder's lengths are not those that the host was told.
            host = None if pool is Pool.ENCODER else self.host_kv_lens
            plan = engine.plan(self.qo_indptr, self.layouts[pool], kv_lens=host, params=params)
            self.plans[pool, key] = plan
        return plan


class Steps:
    """Makes steps from SGLang's ForwardBatch; keeps what does not change from one to the next."""

    def __init__(self, table: Tensor, max_requests: int, max_context: int, page_size: int = 1) -> None:
        """Args:
        table: int32 ``[table_rows, max_context]``, SGLang's ``req_to_token``.
        max_requests: of one step.
        max_context: tokens of the longest request, what the host knows of a length it was not told.
        page_size: tokens of a page, from column 0 of a row on, whose slots are consecutive.
        """  # noqa: D205
        self.table = TokenTable.of(table)
        self.page_size = page_size
        self.max_context = max_context
        self.one_each = torch.arange(max_requests + 1, dtype=torch.int32)

    def decode(self, batch: Any) -> Step:
        """A query for each request."""
        return self._step(batch, self._every(1, batch.batch_size), self._lengths(batch), extend=False)

    def extend(self, batch: Any) -> Step:
        """The last tokens of each request are queries: prefill with and without a prefix, mixed steps, draft extend."""
        lens, host = batch.extend_seq_lens, batch.extend_seq_lens_cpu
        if lens.device.type != "cpu":
            lens = torch.tensor(host, dtype=torch.int32) if host is not None else lens.cpu()
        indptr = torch.zeros(batch.batch_size + 1, dtype=torch.int32)
        torch.cumsum(lens[: batch.batch_size], 0, out=indptr[1:], dtype=torch.int32)
        return self._step(batch, indptr, self._lengths(batch), extend=True)

    def verify(self, batch: Any, drafts_only: Tensor | None = None) -> Step:
        """Drafts behind the text of each request, which the lengths do not count yet.

        Args:
            batch: of SGLang.
            drafts_only: the buffer that SGLang was given for masks without the prefix.
        """
        drafts = int(batch.spec_info.draft_token_num)
        chain = getattr(batch.spec_info, "topk", None) == 1
        lengths = self._lengths(batch, more=drafts)
        step = self._step(batch, self._every(drafts, batch.batch_size), lengths, extend=True, tree=not chain)
        mask = getattr(batch.spec_info, "custom_mask", None)
        # A chain needs no mask: each draft sees those before it.
        if mask is not None and not chain:
            own = drafts_only is not None and mask.data_ptr() == drafts_only.data_ptr()
            with_prefix = not own and mask.shape[0] != batch.batch_size * drafts * drafts
            step.tree = tail_masks(mask, batch.seq_lens, drafts, with_prefix=with_prefix)
        return step

    def branches(self, batch: Any, branches: int, drafted: int) -> Step:
        """Several queries for each request; lengths do not count ``drafted`` keys, those of the queries included."""
        indptr = self._every(branches, batch.batch_size)
        return self._step(batch, indptr, self._lengths(batch, more=drafted), extend=False, tree=branches > 1)

    def _lengths(self, batch: Any, more: int = 0) -> tuple[Tensor, Tensor | None]:
        """KV lengths on the device, and what the host knows of them where that is another place."""
        lengths = batch.seq_lens.to(torch.int32)
        if more:
            lengths = lengths + more
        if lengths.device.type == "cpu":
            return lengths, None
        if batch.seq_lens_cpu is not None:
            return lengths, batch.seq_lens_cpu.to(torch.int32) + more
        return lengths, torch.full(lengths.shape, self.max_context, dtype=torch.int32)

    def _every(self, queries: int, requests: int) -> Tensor:
        if requests >= self.one_each.shape[0]:
            self.one_each = torch.arange(requests + 1, dtype=torch.int32)
        indptr = self.one_each[: requests + 1]
        return indptr if queries == 1 else indptr * queries

    def _step(
        self, batch: Any, indptr: Tensor, lengths: tuple[Tensor, Tensor | None], *, extend: bool, tree: bool = False
    ) -> Step:
        kv_lens, host = lengths
        rows, encoder_lens = batch.req_pool_indices, batch.encoder_lens
        step = Step(indptr, rows, kv_lens, host, extend, encoder_lens=encoder_lens)
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
