"""Token tables to layouts: what SGLang has.

A token table is an int32 tensor with a row per request; entry j of a row is the cache slot of the request's token j. A
slot is a block of one token, so a layout is the table as it lies and a list of where rows begin. Pages change nothing:
tokens of a page have neighbouring slots, and the table holds them too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.checks import check_tensor
from attnloom.core.layout import BlockSparseLayout


@dataclass(frozen=True, eq=False)
class TokenTable:
    """A token table, wrapped once: a step points into it and copies nothing.

    Attributes:
        slots: int32 ``[table_rows * pitch]``, the table's own memory.
        pitch: entries from one row to the next.
    """

    slots: Tensor
    pitch: int

    @classmethod
    def of(cls, table: Tensor) -> TokenTable:
        """Wrap a table int32 ``[table_rows, max_tokens]``, contiguous (SGLang's ``req_to_token``).

        Raises:
            TypeError, ValueError: it is none; the message names `table`.
        """
        check_tensor("table", table, dtype=torch.int32, ndim=2)
        if not table.is_contiguous():
            raise ValueError(
                f"table.stride()={table.stride()}: expected a contiguous table, shape {tuple(table.shape)}"
            )
        return cls(table.view(-1), table.shape[1])

    def layout(self, rows: Tensor, lengths: Tensor, first: Tensor | None = None) -> BlockSparseLayout:
        """Where the KV of requests lies.

        Args:
            rows: integer ``[requests]``, the table's row of each request.
            lengths: int32 ``[requests]``, KV tokens of each.
            first: integer ``[requests]``, the column of a request's first token; None: 0. Models with an encoder keep
                its tokens at the beginning of a row.
        """
        starts = rows.to(torch.int64) * self.pitch
        if first is not None:
            starts += first
        return BlockSparseLayout(1, starts, lengths, self.slots)


def slot_cache(cache: Tensor) -> Tensor:
    """A cache of slots as the engine takes it, a view: ``[slots, heads, dim]`` to ``[slots, 1, heads, dim]``."""
    check_tensor("cache", cache, ndim=3)
    return cache.unsqueeze(1)
