"""The block masks of an engine: its variant's logits_mask, evaluated at every position below a length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnloom.core import launch
from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_positive
from attnloom.core.hook_text import code_of
from attnloom.core.params import Value

if TYPE_CHECKING:
    from attnloom.core.attention import Attention


class EngineMasks:
    """Block masks by what they were evaluated from: each is computed once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[BlockMask, list[Value]]] = {}

    def get(self, engine: Attention, length: int, num_requests: int, params: Mapping[str, Value] | None) -> BlockMask:
        """See :meth:`attnloom.Attention.block_mask`; always asked by the same engine."""
        check_positive("length", length)
        check_positive("num_requests", num_requests)
        variant = engine.variant
        if not variant.logits_mask:
            raise ValueError(f"block_mask: expected a variant with a logits_mask, {variant.name} has none")
        if any(re.search(r"\b[qk]v?_index\b", code_of(text)) for text in variant.texts("logits_mask")):
            raise ValueError(f"block_mask: the mask of {variant.name} is over q_index and kv_index, not positions")
        values = engine.params.values(params, num_requests)
        block = engine.tiles.tile_kv
        length = 1 << (max(length, block) - 1).bit_length()
        key = (length, num_requests, *(id(value) if isinstance(value, Tensor) else value for value in values))
        if key not in self._kept:
            blocks = -(-length // block)
            kinds = torch.empty(num_requests, blocks, blocks, dtype=torch.uint8, device=engine.device)
            launch.fill_block_mask(engine, kinds, length, engine.params.pack(values))
            # The values stay with the mask, so that the ids in the key stay theirs.
            self._kept[key] = (BlockMask(kinds, block), values)
        return self._kept[key][0]
