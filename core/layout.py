"""The block-sparse layout: where the KV of each request lives (FlashInfer, arXiv 2501.01005, section 3.1).

A layout is a block-sparse matrix in compressed rows. A row is a request, a column a KV slot, a non-zero block a page
of ``block_size`` consecutive slots. Page tables and token tables of the serving frameworks are layouts as they lie:
nothing is copied or flattened. A token table has an entry for every token; of a page in it only the first entry is
read, which is what the stride between entries is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.checks import check_positive, check_positive_int32, check_tensor


@dataclass(frozen=True, eq=False)
class BlockSparseLayout:
    """Where the KV of each row lies.

    The id of block i of row r is ``indices[starts[r] + i * index_stride]``, for i below ``ceil(lengths[r] /
    block_size)``. Block b is ``cache[b]`` of a cache ``[num_blocks, block_size, heads, dim]``. Blocks may overlap in
    memory: where ids are slots and not pages, a cache is a view with a block at every slot, its first strides equal.

    Attributes:
        block_size: KV tokens of a block, at least 1.
        starts: int64 ``[num_rows]``, offset of a row's first block id in ``indices``.
        lengths: int32 ``[num_rows]``, KV tokens of a row. Kernels read it at run time, so it may shrink after a plan;
            like the other tensors it stays where it is as long as there are plans, whose launches keep addresses.
        indices: int32 ``[n]``, block ids; a view of the framework's own table.
        positions: int32 ``[n]`` or None, indexed like ``indices``: logical position of a block's first slot. None:
            block i of a row is at position ``i * block_size``. Query i of n sits at position ``end - n + i``, ``end``
            being one past the position of the row's last slot.
        index_stride: entries of ``indices`` (and ``positions``) from one block of a row to the next, 1 to 2^31 - 1.

    Raises:
        TypeError, ValueError: a tensor of another dtype, shape or device, a number out of range; the message names it.
    """

    block_size: int
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    positions: Tensor | None = None
    index_stride: int = 1

    def __post_init__(self) -> None:
        check_positive("block_size", self.block_size)
        check_positive_int32("index_stride", self.index_stride)
        check_tensor("indices", self.indices, dtype=torch.int32, ndim=1)
        device = self.indices.device
        check_tensor("starts", self.starts, dtype=torch.int64, ndim=1, device=device)
        check_tensor("lengths", self.lengths, dtype=torch.int32, ndim=1, device=device)
        if self.starts.shape != self.lengths.shape:
            raise ValueError(
                f"lengths.shape={tuple(self.lengths.shape)}: expected one per row as starts, {tuple(self.starts.shape)}"
            )
        for name in ("starts", "lengths", "indices"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{name}.stride()={getattr(self, name).stride()}: expected a contiguous tensor")
        if self.positions is not None:
            check_tensor("positions", self.positions, dtype=torch.int32, ndim=1, device=device)
            if self.positions.shape != self.indices.shape or not self.positions.is_contiguous():
                raise ValueError(
                    f"positions.shape={tuple(self.positions.shape)}: expected contiguous and one per entry of indices, "
                    f"{tuple(self.indices.shape)}"
                )

    @property
    def num_rows(self) -> int:
        """Rows, one per request."""
        return self.starts.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the index arrays lie."""
        return self.indices.device

    def to(self, device: torch.device | str) -> BlockSparseLayout:
        """The same layout with its arrays on another device."""
        positions = None if self.positions is None else self.positions.to(device)
        return BlockSparseLayout(
            self.block_size,
            self.starts.to(device),
            self.lengths.to(device),
            self.indices.to(device),
            positions,
            self.index_stride,
        )

    def entries(self, blocks: Tensor) -> Tensor:
        """Where the entries of blocks lie in ``indices`` and ``positions``.

        Args:
            blocks: int64 ``[num_rows, n]``, numbers of blocks inside each row.

        Returns:
            int64 ``[num_rows, n]``.
        """
        return self.starts[:, None] + blocks * self.index_stride

    @classmethod
    def from_page_table(cls, block_table: Tensor, lengths: Tensor, block_size: int) -> BlockSparseLayout:
        """A table of page ids, one row per request, as vLLM's block table. Zero copy.

        Args:
            block_table: int32 ``[num_rows, max_blocks]``, rows any pitch apart, ids in a row contiguous.
            lengths: int32 ``[num_rows]``, KV tokens of each request.
            block_size: tokens of a page.
        """
        check_positive("block_size", block_size)
        flat, pitch = flat_table(block_table)
        starts = torch.arange(block_table.shape[0], dtype=torch.int64, device=block_table.device) * pitch
        return cls(block_size, starts, lengths, flat)

    @classmethod
    def from_csr(cls, indptr: Tensor, indices: Tensor, lengths: Tensor, block_size: int) -> BlockSparseLayout:
        """Compressed rows: block ids of row r are ``indices[indptr[r] : indptr[r + 1]]``. Zero copy of the ids.

        Args:
            indptr: int32 or int64 ``[num_rows + 1]``.
            indices: int32 ``[n]``.
            lengths: int32 ``[num_rows]``, tokens; the last block of a row may be part full.
            block_size: tokens of a block.

        Raises:
            ValueError: on a CPU, a row with more tokens than its blocks hold.
        """
        check_positive("block_size", block_size)
        check_tensor("indptr", indptr, ndim=1)
        if indptr.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"indptr.dtype={indptr.dtype}: expected torch.int32 or torch.int64")
        if indptr.shape[0] == 0:
            raise ValueError("indptr.shape=(0,): expected num_rows + 1 entries")
        layout = cls(block_size, indptr[:-1].to(torch.int64), lengths, indices)
        if not indptr.is_cuda:
            _check_csr(indptr.to(torch.int64), indices.shape[0], lengths, block_size)
        return layout

    @classmethod
    def from_token_table(
        cls, token_table: Tensor, rows: Tensor, lengths: Tensor, page_size: int = 1
    ) -> BlockSparseLayout:
        """A table of token slots, as SGLang's ``req_to_token``. Zero copy.

        Args:
            token_table: int32 ``[table_rows, max_tokens]``, slots of a row contiguous.
            rows: int32 or int64 ``[num_rows]``, the table's row of each request.
            lengths: int32 ``[num_rows]``.
            page_size: tokens of a block. From every page_size-th token of a request on, as many tokens lie in
                consecutive slots: only the first of them is looked up. Caches are then views with a block at every
                slot.
        """
        check_positive_int32("page_size", page_size)
        check_tensor("rows", rows, ndim=1)
        if rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"rows.dtype={rows.dtype}: expected torch.int32 or torch.int64")
        whole = cls.from_page_table(token_table, lengths.new_zeros(token_table.shape[0]), 1)
        pitch = token_table.stride(0) if token_table.shape[0] > 1 else token_table.shape[1]
        if not rows.is_cuda and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < token_table.shape[0]:
            raise ValueError(f"rows={rows.tolist()}: expected rows of token_table, 0 to {token_table.shape[0] - 1}")
        return cls(page_size, rows.to(torch.int64) * pitch, lengths, whole.indices, index_stride=page_size)

    @classmethod
    def from_mask(cls, mask: Tensor, block_size: int, lengths: Tensor | None = None) -> BlockSparseLayout:
        """Any boolean block mask, as importance masks (Quest) give it. Blocks keep their logical positions.

        Args:
            mask: bool ``[num_rows, num_blocks]``: which blocks of the cache a row reads, in ascending order.
            block_size: tokens of a block.
            lengths: int32 ``[num_rows]``, tokens in the chosen blocks when the last one is part full; None: all full.
        """
        check_positive("block_size", block_size)
        check_tensor("mask", mask, dtype=torch.bool, ndim=2)
        counts = mask.sum(1)
        indptr = torch.zeros(mask.shape[0] + 1, dtype=torch.int64, device=mask.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        indices = mask.nonzero()[:, 1].to(torch.int32)
        if lengths is None:
            lengths = (counts * block_size).to(torch.int32)
        else:
            check_tensor("lengths", lengths, dtype=torch.int32, ndim=1, device=mask.device)
            if not mask.is_cuda:
                _check_csr(indptr, indices.shape[0], lengths, block_size)
        return cls(block_size, indptr[:-1].contiguous(), lengths, indices, indices * block_size)

    @classmethod
    def from_tree(
        cls, slots: Sequence[Tensor], parents: Sequence[Sequence[int]], *, device: torch.device | str = "cpu"
    ) -> tuple[BlockSparseLayout, dict[str, Tensor]]:
        """Draft trees of speculative decoding: the prefix as slots, the drafts under a packed mask.

        Row r holds the slots of a request's prefix, then one slot per draft token; the queries are the drafts, in the
        same order. A draft sees the prefix, its ancestors and itself. Its position is the prefix length plus its depth,
        which hooks (rotary embeddings, ALiBi) use; visibility comes from the mask, so the variant that runs this is
        ``Full() & PackedMask()``. As keys, drafts are at those positions; as queries they count from the row's end like
        everywhere, so a hook that reads ``q_pos`` (fused rotary embeddings) sees siblings one apart.

        Args:
            slots: per request an int32 tensor ``[prefix + drafts]`` of token slots.
            parents: per request the parent of each draft, an earlier draft's index or -1 for a child of the prefix.
            device: where the result lies.

        Returns:
            the layout (block size 1), and the parameters of :func:`attnloom.variants.PackedMask`.

        Raises:
            ValueError: a parent that is not an earlier draft; more drafts than slots.
        """
        from attnloom.core.masks import pack_masks

        if len(slots) != len(parents):
            raise ValueError(f"parents: expected one list per request as slots, {len(slots)}, got {len(parents)}")
        positions: list[Tensor] = []
        masks: list[Tensor] = []
        for request, (row, tree) in enumerate(zip(slots, parents, strict=True)):
            check_tensor(f"slots[{request}]", row, dtype=torch.int32, ndim=1)
            prefix = row.shape[0] - len(tree)
            if prefix < 0:
                raise ValueError(
                    f"parents[{request}]: expected at most {row.shape[0]} drafts, as slots, got {len(tree)}"
                )
            seen = torch.eye(len(tree), dtype=torch.bool)
            depths = [0] * len(tree)
            for draft, parent in enumerate(tree):
                if not -1 <= parent < draft:
                    raise ValueError(f"parents[{request}][{draft}]={parent}: expected -1 or an earlier draft")
                if parent >= 0:
                    depths[draft] = depths[parent] + 1
                    seen[draft] |= seen[parent]
            positions.append(
                torch.cat([torch.arange(prefix), prefix + torch.tensor(depths, dtype=torch.int64)]).to(torch.int32)
            )
            masks.append(seen)
        lengths = torch.tensor([row.shape[0] for row in slots], dtype=torch.int32)
        starts = torch.cumsum(lengths, 0) - lengths
        empty = torch.empty(0, dtype=torch.int32)
        layout = cls(
            1,
            starts.to(device),
            lengths.to(device),
            torch.cat([empty, *(row.cpu() for row in slots)]).to(device),
            torch.cat([empty, *positions]).to(device),
        )
        kv_begin = [row.shape[0] - len(tree) for row, tree in zip(slots, parents, strict=True)]
        return layout, pack_masks(masks, kv_begin, device=device)


def flat_table(block_table: Tensor) -> tuple[Tensor, int]:
    """A table of ids as one row, from its first id to its last, and the entries from a row to the next. Zero copy.

    Args:
        block_table: int32 ``[num_rows, max_blocks]``, rows any pitch apart, ids in a row contiguous.
    """
    check_tensor("block_table", block_table, dtype=torch.int32, ndim=2)
    rows, columns = block_table.shape
    pitch = block_table.stride(0) if rows > 1 else columns
    if columns > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table.stride()={block_table.stride()}: expected ids of a row to be contiguous")
    if pitch < 0:
        raise ValueError(f"block_table.stride()={block_table.stride()}: expected a pitch of at least 0")
    return block_table.as_strided(((rows - 1) * pitch + columns if rows and columns else 0,), (1,)), pitch


def _check_csr(indptr: Tensor, num_indices: int, lengths: Tensor, block_size: int) -> None:
    counts = indptr[1:] - indptr[:-1]
    if int(indptr[0]) < 0 or int(indptr[-1]) > num_indices or bool((counts < 0).any()):
        raise ValueError(f"indptr={indptr.tolist()}: expected ascending offsets into {num_indices} indices")
    if lengths.shape != counts.shape:
        raise ValueError(f"lengths.shape={tuple(lengths.shape)}: expected one per row, {tuple(counts.shape)}")
    short = (lengths < 0) | (lengths > counts * block_size)
    if bool(short.any()):
        row = int(short.nonzero()[0])
        raise ValueError(
            f"lengths[{row}]={int(lengths[row])}: expected 0 to {int(counts[row]) * block_size}, "
            f"what {int(counts[row])} blocks of {block_size} hold"
        )
