"""Drafting of several steps: the draft model decodes, and each of its steps has a backend of its own."""

from __future__ import annotations

from typing import Any

import torch

from attnloom.adapters.draft_tree import branch_masks
from attnloom.backends.sglang.backend import AttnloomAttnBackend
from attnloom.backends.sglang.layer import Seen
from attnloom.backends.sglang.step import Step


class AttnloomMultiStepDraftBackend:
    """The backends of all steps but the last, which drafts nothing that needs attention.

    Branches of a request are its queries. They share the prefix, and a mask gives each its own drafts, which SGLang has
    laid out behind the prefix, branch after branch; with pages each branch begins with a copy of the prefix's last
    page.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        """As SGLang's factory makes it.

        Raises:
            NotImplementedError: the draft model has layers that depend on positions, which branches do not have here.
        """
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.page_size: int = model_runner.server_args.page_size
        self.attn_backends = [AttnloomAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]
        if topk == 1:
            return
        for backend in self.attn_backends:
            for served in backend.layers.values():
                if served.reach is not None or served.temperature_len is not None:
                    raise NotImplementedError(
                        f"attnloom cannot draft {speculative_num_steps} steps with --speculative-eagle-topk {topk}: "
                        f"layer {served.name} of the draft model has a sliding window or a temperature by position; "
                        "expected topk 1"
                    )
                served.engine(Seen.TREE, sinks=False)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begin all steps of one round of drafting.

        Args:
            forward_batch: with requests, not branches: lengths ``[requests]``, without drafts.
        """
        for done, backend in enumerate(self.attn_backends):
            if forward_batch.batch_size == 0:
                backend.step = None
                continue
            backend.begin(self._step(backend, forward_batch, done), forward_batch)

    def _step(self, backend: AttnloomAttnBackend, forward_batch: Any, done: int) -> Step:
        if self.topk == 1:
            return backend.steps.branches(forward_batch, 1, done + 1)
        prefix = forward_batch.seq_lens.to(torch.int64)
        if self.page_size == 1:
            widest = self.speculative_num_steps
            stride = torch.full_like(prefix, widest)
        else:
            widest = self._pages(self.page_size - 1)
            stride = self._pages(prefix % self.page_size)
        step = backend.steps.branches(forward_batch, self.topk, stride * (self.topk - 1) + done + 1)
        step.tree = branch_masks(prefix, self.topk, stride, widest, done)
        return step

    def _pages(self, in_last_page: Any) -> Any:
        """Slots of one branch: the prefix's part-full page, copied, and the drafts, in whole pages."""
        return (in_last_page + self.speculative_num_steps + self.page_size - 1) // self.page_size * self.page_size
