"""Page tables to layouts: what vLLM has.

A page table is an int32 tensor with a row per request; entry j of a row is the page that holds the request's tokens
`j * page_size ... (j + 1) * page_size - 1`. Frameworks keep it in a buffer that is wider than any request needs, so
rows are strided; the layout points into it and copies nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.core.layout import BlockSparseLayout


def paged_layout(page_table: Tensor, lengths: Tensor, page_size: int) -> BlockSparseLayout:
    """The layout of requests whose KV lies in pages.

    Args:
        page_table: int32 [>= requests, pages], any row stride. Rows past `lengths` and entries past a request's last
            page are never read.
        lengths: int32 [requests], true KV tokens of each request.
        page_size: KV tokens of a page.

    Raises:
        TypeError or ValueError: from BlockSparseLayout.from_page_table, naming the argument.
    """
    return BlockSparseLayout.from_page_table(page_table[: lengths.shape[0]], lengths, page_size)


def ragged_layout(indptr: Tensor, num_tokens: int | None = None) -> BlockSparseLayout:
    """The layout of requests whose KV is not in pages but lies end to end in one [tokens, heads, dim] tensor.

    Every token is a block of its own; seen as a cache, the tensor is [tokens, 1, heads, dim].

    Args:
        indptr: int32 [requests + 1]; request r holds tokens indptr[r] ... indptr[r + 1] - 1.
        num_tokens: at least indptr[-1]; None: indptr[-1], for which a GPU is waited for.
    """
    tokens = int(indptr[-1]) if num_tokens is None else num_tokens
    indices = torch.arange(tokens, dtype=torch.int32, device=indptr.device)
    lengths = (indptr[1:] - indptr[:-1]).to(torch.int32)
    return BlockSparseLayout(block_size=1, starts=indptr[:-1].to(torch.int64), lengths=lengths, indices=indices)


def split_interleaved_cache(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache that keeps them side by side.

    Args:
        cache: [pages, kv_heads, page_size, head_dim + head_dim_v], any strides.
        head_dim: elements of a key; the rest of the last dimension is the value.

    Returns:
        Views (keys, values) as the engine takes them: [pages, page_size, kv_heads, head_dim] and [..., head_dim_v].
    """
    if cache.dim() != 4 or not 0 < head_dim < cache.shape[3]:
        raise ValueError(
            f"cache must be [pages, kv_heads, page_size, > {head_dim}] to hold keys of {head_dim} and values, "
            f"got shape {tuple(cache.shape)}"
        )
    tokens_first = cache.transpose(1, 2)
    return tokens_first[..., :head_dim], tokens_first[..., head_dim:]
