"""The block mask that a server keeps: evaluated as far as positions have come, and never again.

From a logits_mask alone nobody knows which keys it hides; a mask over positions hides the same ones in every step, so
what was found out once serves all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnloom.core import launch
from attnloom.core.block_mask import PARTIAL, BlockMask
from attnloom.core.checks import check_positive
from attnloom.core.params import Value, pack

if TYPE_CHECKING:
    from attnloom.core.attention import Attention


class PositionMask:
    """The block mask of a causal variant whose mask is over positions.

    Blocks that were not evaluated yet are partial, so plans and kernels are right whatever was: evaluating changes what
    is skipped. The memory stays where it is.

    Args:
        engine: whose variant it is.
        length: positions that may ever be needed; the mask takes ``(length / 64) ** 2`` bytes.
        values: the variant's parameters, checked and in their order.

    Raises:
        ValueError: the variant's mask is not over positions (:attr:`Variant.masks_by_position`), or it is not causal.
    """

    def __init__(self, engine: Attention, length: int, values: Sequence[Value]) -> None:
        check_positive("length", length)
        variant = engine.variant
        if not variant.masks_by_position:
            raise ValueError(f"variant={variant.name}: expected a logits_mask over positions, heads and numbers alone")
        if variant.right != 0:
            raise ValueError(f"variant.right={variant.right} of {variant.name}: expected 0, a causal variant")
        self.engine = engine
        self._words = pack(variant.params, values)
        self._values = values  # where the words point to
        block = engine.tiles.tile_kv
        blocks = -(-length // block)
        kinds = torch.full((1, blocks, blocks), PARTIAL, dtype=torch.uint8, device=engine.device)
        self.mask = BlockMask(kinds, block)
        self.known = 0
        """Query blocks that were evaluated."""

    def up_to(self, length: int) -> BlockMask | None:
        """The mask, evaluated for queries and keys before position ``length``; None if it holds no such positions.

        What is new is evaluated: for n new positions and as many heads as the mask tells apart, n times ``length``
        calls of the hook, little beside the attention of those positions.
        """
        if not self.mask.covers(length):
            return None
        needed = -(-length // self.mask.block_size)
        if needed > self.known:
            whole = self.mask.kinds.shape[1] * self.mask.block_size
            # Nobody looks right of the diagonal.
            launch.fill_block_mask(self.engine, self.mask.kinds, whole, self._words, (self.known, needed, needed))
            self.known = needed
        return self.mask
