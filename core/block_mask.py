"""Block masks: which KV tiles a query block sees at all, so that hidden ones are skipped and full ones need no mask.

FlexAttention's BlockMask (arXiv 2412.05496), over positions: query block i holds positions ``i * block .. i * block +
block - 1``. It does not depend on the lengths of a step, so one serves every step up to its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.core.abi import BlockMaskTensor
from attnloom.core.checks import check_positive, check_tensor

HIDDEN, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Kinds of blocks.

    Attributes:
        kinds: uint8 ``[1 or num_requests, q_blocks, kv_blocks]``: 0 hidden, 1 partial (the variant's mask decides on
            each key), 2 full (every query of the block sees every key). One mask serves all requests.
        block_size: positions of a block; the KV tile of the engine.
    """

    kinds: Tensor
    block_size: int

    def __post_init__(self) -> None:
        check_tensor("kinds", self.kinds, dtype=torch.uint8, ndim=3)
        check_positive("block_size", self.block_size)
        if not self.kinds.is_contiguous():
            raise ValueError(f"kinds.stride()={self.kinds.stride()}: expected a contiguous tensor")
        # On a GPU it is not looked at: that would wait for the device.
        if not self.kinds.is_cuda and self.kinds.numel() and int(self.kinds.max()) > FULL:
            raise ValueError(f"kinds={int(self.kinds.max())}: expected 0 (hidden), 1 (partial) or 2 (full)")

    @classmethod
    def from_dense(cls, mask: Tensor, block_size: int) -> BlockMask:
        """From a mask of every (query position, key position).

        Args:
            mask: bool ``[queries, keys]`` or ``[num_requests, queries, keys]``.
            block_size: positions of a block.
        """
        check_tensor("mask", mask, dtype=torch.bool)
        check_positive("block_size", block_size)
        if mask.dim() not in (2, 3):
            raise ValueError(f"mask.shape={tuple(mask.shape)}: expected 2 or 3 dimensions")
        mask = mask if mask.dim() == 3 else mask[None]
        requests, queries, keys = mask.shape
        q_blocks, kv_blocks = -(-queries // block_size), -(-keys // block_size)

        def blocks(fill: bool) -> Tensor:
            padded = mask.new_full((requests, q_blocks * block_size, kv_blocks * block_size), fill)
            padded[:, :queries, :keys] = mask
            return padded.view(requests, q_blocks, block_size, kv_blocks, block_size)

        seen = blocks(False).any(4).any(2)
        whole = blocks(True).all(4).all(2) & seen
        return cls((seen.to(torch.uint8) + whole.to(torch.uint8)).contiguous(), block_size)

    @property
    def density(self) -> float:
        """Share of the blocks that are computed."""
        return float((self.kinds != HIDDEN).to(torch.float32).mean()) if self.kinds.numel() else 0.0

    def covers(self, length: int) -> bool:
        """Whether every position below ``length`` lies in a block, as a query and as a key."""
        return length <= min(self.kinds.shape[1], self.kinds.shape[2]) * self.block_size

    def struct(self) -> BlockMaskTensor:
        """As a kernel takes it."""
        return mask_struct(self.kinds)


def mask_struct(kinds: Tensor | None) -> BlockMaskTensor:
    """The struct of the kinds of a block mask; None is none."""
    if kinds is None:
        return BlockMaskTensor()
    requests, q_blocks, kv_blocks = kinds.shape
    stride = q_blocks * kv_blocks if requests > 1 else 0
    return BlockMaskTensor(kinds.data_ptr(), stride, q_blocks, kv_blocks)
