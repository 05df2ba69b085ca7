"""A second pool for windowed layers: its slots, beside a token table of the first.

SGLang can keep the layers of sliding windows in a smaller pool. The token table then holds slots of the full pool, and
a mapping (slot of the full pool to slot of the other) says where a token's keys lie for windowed layers; what left the
window is unmapped.

Pages of one pool are pages of the other where both give whole pages to the same tokens and take whole pages back. Of a
page only its first slot is translated then, as layouts look up no other.
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
    are outside of every window. With pages it is the first columns of pages that are written, and read. The table stays
    where it is.
    """

    def __init__(self, table: TokenTable) -> None:
        """Args:
        table: slots of the full pool.
        """  # noqa: D205
        self.full = table
        self.table = TokenTable(torch.zeros_like(table.slots), table.pitch)

    def after_new_tokens(self, rows: Tensor, lengths: Tensor, mapping: Tensor, page_size: int = 1) -> BlockSparseLayout:
        """Translate the last slot of each request, or its page; where the KV of windowed layers lies.

        Args:
            rows: integer ``[requests]``, the table's row of each request.
            lengths: int32 ``[requests]``, KV tokens of each, at least 1.
            mapping: integer, from a slot of the full pool to one of the other.
            page_size: tokens of a block in both pools, as :meth:`TokenTable.layout` takes it; as in the step before.
        """
        layout = self.table.layout(rows, lengths, page_size=page_size)
        entries = layout.starts + lengths - 1
        if page_size > 1:
            entries -= (lengths - 1) % page_size
        self.table.slots[entries] = mapping[self.full.slots[entries]].to(torch.int32)
        return layout

    def after_any_step(
        self, rows: Tensor, lengths: Tensor, columns: Tensor, mapping: Tensor, page_size: int = 1
    ) -> BlockSparseLayout:
        """Translate the last slots of each request; where the KV of windowed layers lies.

        A request at a time, slice by slice: small operations stay on the thread that asks for them, where few large
        ones would each wait for all threads.

        Args:
            rows: as above.
            lengths: int32 ``[requests]``, KV tokens of each, its queries included.
            columns: int32 ``[requests]``, how many of them to translate, at most all.
            mapping: as above; it maps the whole of a page of which any slot is to be translated.
            page_size: as above.
        """
        layout = self.table.layout(rows, lengths, page_size=page_size)
        for start, length, count in zip(layout.starts.tolist(), lengths.tolist(), columns.tolist(), strict=True):
            first = max(0, length - count) // page_size * page_size
            part = slice(start + first, start + length, page_size)
            self.table.slots[part] = mapping[self.full.slots[part]]
        return layout

    def last_columns(self, rows: Tensor, lengths: Tensor, columns: int, mapping: Tensor, page_size: int = 1) -> None:
        """Translate the last slots of each request, as many for all: nothing is read back from a GPU.

        Args:
            rows: as above.
            lengths: int32 ``[requests]``; shorter requests have all of theirs translated.
            columns: how many.
            mapping: as above.
            page_size: as above.
        """
        starts = (rows.to(torch.int64) * self.full.pitch).view(-1, 1)
        last = (lengths.view(-1, 1) - 1) // page_size
        # The first of the columns may be the last of its page.
        pages = 1 + -(-(min(columns, self.full.pitch) - 1) // page_size)
        entries = (starts + (last - torch.arange(pages, device=rows.device)).clamp(min=0) * page_size).view(-1)
        self.table.slots[entries] = mapping[self.full.slots[entries]].to(torch.int32)
