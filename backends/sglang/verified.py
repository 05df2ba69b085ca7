"""Trees of drafts that a step verifies: which of them see each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnloom.adapters.draft_tree import draft_columns, tail_masks


class VerifiedTrees:
    """Masks among drafts, at addresses that stay: CUDA graphs read them there.

    SGLang fills the one that it was given in place, after drafting; any other mask is copied before its step.

    Args:
        max_requests: of one step.
        device: where.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self.max_requests = max_requests
        self.device = device
        self._masks: dict[int, Tensor] = {}

    def mask(self, drafts: int) -> Tensor:
        """Bool ``[max_requests * drafts * drafts]``, request after request: for each draft which drafts it sees."""
        found = self._masks.get(drafts)
        if found is None:
            size = self.max_requests * drafts * drafts
            found = self._masks[drafts] = torch.zeros(size, dtype=torch.bool, device=self.device)
        return found

    def stage(self, batch: Any) -> None:
        """Before a step, and before every replay of its graph: its mask is where :meth:`params` reads it."""
        given = _tree_of(batch)
        if given is None:
            return
        drafts = int(batch.spec_info.draft_token_num)
        own = self.mask(drafts)
        if given.data_ptr() == own.data_ptr():
            return
        # A replay has as many requests as were captured; the mask has those that there are.
        requests = batch.batch_size - getattr(batch, "num_padding", 0)
        pairs = requests * drafts * drafts
        # With the prefix, rows are longer. SGLang says nowhere which it is.
        if given.shape[0] != pairs:
            given = draft_columns(given, batch.seq_lens[:requests], drafts)
        own[:pairs].copy_(given)

    def params(self, batch: Any) -> dict[str, Tensor]:
        """The parameters of the mask; empty where drafts are a chain, in which each sees those before it."""
        if _tree_of(batch) is None:
            return {}
        drafts = int(batch.spec_info.draft_token_num)
        return tail_masks(self.mask(drafts), batch.seq_lens[: batch.batch_size], drafts, with_prefix=False)


def _tree_of(batch: Any) -> Tensor | None:
    mask: Tensor | None = getattr(batch.spec_info, "custom_mask", None)
    return None if getattr(batch.spec_info, "topk", None) == 1 else mask
