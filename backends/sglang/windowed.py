"""Layers of sliding windows whose keys SGLang keeps in a pool of their own: their layout, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.adapters.slot_translation import TranslatedTable
from attnloom.adapters.token_table import TokenTable
from attnloom.core.layout import BlockSparseLayout


class WindowedSteps:
    """The table of slots in the pool of windowed layers, and what the step before has written there.

    While the same requests decode, a step adds one column for each. Between any other two steps SGLang may have given
    rows to other requests, or other slots to a prompt that it found in its radix cache: what windows see is then
    translated anew.
    """

    def __init__(self, table: TokenTable, reach: int, *, sees_every_step: bool) -> None:
        """Args:
        table: slots of the full pool.
        reach: keys before its own that a query of any windowed layer may see.
        sees_every_step: no other backend, and no other server, runs prompts of these requests.
        """  # noqa: D205
        self.table = TranslatedTable(table)
        self.reach = reach
        self.compares = sees_every_step
        self.decoded: tuple[Tensor, Tensor] | None = None

    def layout(
        self, rows: Tensor, lengths: Tensor, queries: Tensor, mapping: Tensor, *, decode: bool, page_size: int = 1
    ) -> BlockSparseLayout:
        """Where the KV of windowed layers lies in this step.

        Args:
            rows: integer ``[requests]``, rows of the token table.
            lengths: int32 ``[requests]``, KV tokens of each request, its queries included.
            queries: int32 ``[requests]``, query tokens of each request.
            mapping: from a slot of the full pool to one of the other.
            decode: the step adds one token to each request and nothing else.
            page_size: tokens of a block, the same in all steps that only decode.
        """
        continues = decode and self._continues(rows, lengths)
        # Copies: SGLang may count its own tensors up.
        self.decoded = (rows.clone(), lengths + 1) if decode and self.compares else None
        if continues:
            return self.table.after_new_tokens(rows, lengths, mapping, page_size)
        return self.table.after_any_step(rows, lengths, queries + self.reach, mapping, page_size)

    def _continues(self, rows: Tensor, lengths: Tensor) -> bool:
        if self.decoded is None:
            return False
        return torch.equal(self.decoded[0], rows) and torch.equal(self.decoded[1], lengths)
