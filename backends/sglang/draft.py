"""Drafting of several steps: the draft model decodes, and each of its steps has a backend of its own."""

from __future__ import annotations

from typing import Any

from attnloom.adapters.draft_tree import branch_masks
from attnloom.backends.sglang.backend import AttnloomAttnBackend
from attnloom.backends.sglang.layer import Seen
from attnloom.backends.sglang.step import Step


class AttnloomMultiStepDraftBackend:
    """The backends of all steps but the last, which drafts nothing that needs attention.

    Branches of a request are its queries. They share the prefix, and a mask gives each its own drafts, which SGLang has
    laid out behind the prefix, branch after branch.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        """As SGLang's factory makes it.

        Raises:
            NotImplementedError: branches with pages, which lie otherwise (SGLang itself refuses them for us); or with
                layers that depend on positions, which branches do not have here.
        """
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [AttnloomAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]
        if topk == 1:
            return
        if model_runner.server_args.page_size > 1:
            raise NotImplementedError(
                f"attnloom cannot draft with --speculative-eagle-topk {topk} and --page-size "
                f"{model_runner.server_args.page_size} yet: expected a page size or a topk of 1"
            )
        for backend in self.attn_backends:
            for served in backend.layers.values():
                if served.reach is not None or served.temperature_len is not None:
                    raise NotImplementedError(
                        f"attnloom cannot draft {speculative_num_steps} steps with --speculative-eagle-topk {topk}: "
                        f"layer {served.name} of the draft model has a sliding window or a temperature by position; "
                        "expected topk 1"
                    )
                served.engine(Seen.TREE, sinks=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: what a graph reads is made when its shape is captured."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begin all steps of one round of drafting.

        Args:
            forward_batch: with requests, not branches: lengths ``[requests]``, without drafts.
        """
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As of a backend: what may not be read while a graph runs, for all steps of the round."""
        for done, backend in enumerate(self.attn_backends):
            if forward_batch.batch_size == 0:
                backend.step = None
            elif (mapping := backend.mapping()) is not None:
                backend.translate(self._step(backend, forward_batch, done), mapping, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """As of a backend: all steps of the round, which may be recorded."""
        if forward_batch.batch_size == 0:
            return
        for done, backend in enumerate(self.attn_backends):
            step = self._step(backend, forward_batch, done)
            if self.topk > 1:
                lengths = forward_batch.seq_lens[: forward_batch.batch_size]
                step.tree = branch_masks(lengths, self.topk, self.speculative_num_steps, done)
            backend.begin(step)

    def _step(self, backend: AttnloomAttnBackend, forward_batch: Any, done: int) -> Step:
        drafted = self.speculative_num_steps * (self.topk - 1) + done + 1
        return backend.steps.branches(forward_batch, self.topk, drafted)
