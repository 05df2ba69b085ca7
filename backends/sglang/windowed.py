"""Layers of sliding windows whose keys SGLang keeps in a pool of their own: their layout, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.adapters.slot_translation import TranslatedTable
from attnloom.adapters.token_table import TokenTable
from attnloom.backends.sglang.step import Pool, Step
from attnloom.core.layout import BlockSparseLayout


class WindowedSteps:
    """The table of slots in the pool of windowed layers.

    What the windows of a step see is translated before the step, and before every replay of its CUDA graph, outside of
    it: while a graph runs, SGLang may already give away the slots that the next step is to have.

    Args:
        table: slots of the full pool.
        reach: keys before its own that a query of any windowed layer may see.
    """

    def __init__(self, table: TokenTable, reach: int) -> None:
        self.table = TranslatedTable(table)
        self.reach = reach

    def translate(self, step: Step, mapping: Tensor, *, decode: bool) -> None:
        """Translate what the windows of a step see.

        Args:
            step: whose full layers' layout says whether pages are read. Both pools are handed out and taken back by
                the page then (compat.page_size).
            mapping: from a slot of the full pool to one of the other.
            decode: the step adds one token to each request and nothing else.
        """
        page_size = step.layouts[Pool.FULL].block_size
        self.table.last_columns(step.rows, step.kv_lens, self.reach + step.most, mapping, page_size)

    def layout(self, step: Step) -> BlockSparseLayout:
        """Where the KV of windowed layers lies in a step, in blocks as its full layers' have."""
        return self.table.table.layout(step.rows, step.kv_lens, page_size=step.layouts[Pool.FULL].block_size)


class HostWindowedSteps(WindowedSteps):
    """On a CPU, where lengths can be looked at, what the step before has translated need not be translated again.

    While the same requests decode, a step adds one column for each. Between any other two steps SGLang may have given
    rows to other requests, or other slots to a prompt that it found in its radix cache: what windows see is then
    translated anew.

    Args:
        table: slots of the full pool.
        reach: keys before its own that a query of any windowed layer may see.
        sees_every_step: no other backend, and no other server, runs prompts of these requests.
    """

    def __init__(self, table: TokenTable, reach: int, *, sees_every_step: bool) -> None:
        super().__init__(table, reach)
        self.compares = sees_every_step
        self.decoded: tuple[Tensor, Tensor] | None = None

    def translate(self, step: Step, mapping: Tensor, *, decode: bool) -> None:
        """As above."""
        rows, lengths, page_size = step.rows, step.kv_lens, step.layouts[Pool.FULL].block_size
        continues = decode and self._continues(rows, lengths)
        # Copies: SGLang may count its own tensors up.
        self.decoded = (rows.clone(), lengths + 1) if decode and self.compares else None
        if continues:
            self.table.after_new_tokens(rows, lengths, mapping, page_size)
        else:
            queries = step.qo_indptr[1:] - step.qo_indptr[:-1]
            self.table.after_any_step(rows, lengths, queries + self.reach, mapping, page_size)

    def _continues(self, rows: Tensor, lengths: Tensor) -> bool:
        if self.decoded is None:
            return False
        return torch.equal(self.decoded[0], rows) and torch.equal(self.decoded[1], lengths)
