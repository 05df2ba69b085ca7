"""A second pool for windowed layers: its slots, beside a token table of the first.

SGLang can keep the layers of sliding windows in a smaller pool. The token table then holds slots of the full pool, and
a mapping (slot of the full pool to slot of the other) says where a token's keys lie for windowed layers; what left the
window is unmapped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.adapters.token_table import TokenTable
from attnloom.core.layout import BlockSparseLayout


class TranslatedTable:
    """A token table of the same shape that holds the other pool's slots of what windows still see.

    Each step writes some of its requests' last columns: those that its queries see, or, where the step before has
    written the others, the new ones. Columns before them are left from earlier steps: no kernel reads them, since they
    are outside of every window.
    """

    def __init__(self, table: TokenTable) -> None:
        """Args:
        table: slots of the full pool.
        """  # noqa: D205
        self.full = table
        self.table = TokenTable(torch.zeros_like(table.slots), table.pitch)

    def layout(self, rows: Tensor, lengths: Tensor, columns: Tensor, mapping: Tensor) -> BlockSparseLayout:
        """Translate the last columns of each request; where the KV of windowed layers lies.

        Args:
            rows: integer ``[requests]``, the table's row of each request.
            lengths: int32 ``[requests]``, KV tokens of each, its queries included.
            columns: int32 ``[requests]``, how many of them to translate, at most all.
            mapping: integer, from a slot of the full pool to one of the other.
        """
        layout = self.table.layout(rows, lengths)
        columns = torch.minimum(lengths, columns).to(torch.int64)
        before = torch.cumsum(columns, 0) - columns
        entries = torch.repeat_interleave(layout.starts + lengths - columns - before, columns)
        entries += torch.arange(entries.shape[0], device=entries.device)
        self.table.slots[entries] = mapping[self.full.slots[entries]].to(torch.int32)
        return layout
