"""Token tables to layouts: what SGLang has.

A token table is an int32 tensor with a row per request; entry j of a row is the cache slot of the request's token j. A
layout is the table as it lies and a list of where rows begin. A slot is a block of one token. Where the pool is paged,
tokens ``i * page_size ... (i + 1) * page_size - 1`` of a request have consecutive slots: they are one block, of which
the layout looks up the first slot only, every page_size-th entry of a row. Ids of blocks stay slots; nothing is divided
or gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.checks import check_positive, check_tensor
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

    def layout(
        self, rows: Tensor, lengths: Tensor, first: Tensor | None = None, page_size: int = 1
    ) -> BlockSparseLayout:
        """Where the KV of requests lies.

        Args:
            rows: integer ``[requests]``, the table's row of each request.
            lengths: int32 ``[requests]``, KV tokens of each.
            first: integer ``[requests]``, the column of a request's first token; None: 0. Models with an encoder keep
                its tokens at the beginning of a row.
            page_size: tokens of a block. From every page_size-th token of a request on, as many have consecutive slots;
                the caller knows that, nothing looks.

        Returns:
            a layout for caches as :func:`slot_cache` gives them for blocks of that size.
        """
        starts = rows.to(torch.int64) * self.pitch
        if first is not None:
            starts += first
        return BlockSparseLayout(page_size, starts, lengths, self.slots, index_stride=page_size)


def slot_cache(cache: Tensor, block_size: int = 1) -> Tensor:
    """A cache of slots as the engine takes it, with a block at every slot.

    Args:
        cache: ``[slots, heads, dim]``, any strides.
        block_size: slots of a block, at most all.

    Returns:
        a view ``[slots - block_size + 1, block_size, heads, dim]``: block b holds the slots from b on. Blocks overlap,
        and none reaches past the last slot.

    Raises:
        ValueError: a cache of fewer slots than a block.
    """
    check_tensor("cache", cache, ndim=3)
    slots, heads, dim = cache.shape
    check_positive("block_size", block_size)
    if block_size > slots:
        raise ValueError(f"block_size={block_size}: expected at most {slots}, the slots of the cache")
    slot, head, element = cache.stride()
    return cache.as_strided((slots - block_size + 1, block_size, heads, dim), (slot, slot, head, element))
