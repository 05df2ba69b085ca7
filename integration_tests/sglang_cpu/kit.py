"""SGLang's own conformance kit for attention backends, `sglang.test.kits.attention_unittest`, for attnloom.

Writes a JSON list with one entry for each case: `python -m integration_tests.sglang_cpu.kit TASK.json RESULT.json`;
the task is `[]` for a CPU, `["cuda"]` for a GPU. The kit has references of its own and makes the backend by its name
from SGLang's registry. Its heads are of 64 here: its default of 16 is smaller than any that attnloom has kernels for.

Most of its cases of CUDA graphs capture nothing: they make the metadata of a capture and of a padded replay, and run
the layer after either, which a CPU can do as well. Those that run SGLang's own graph runners need a GPU.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

NAME = "attnloom"
DENSE = "sglang.test.kits.attention_unittest.attention_methods.dense_attention"
# The kit's shuffled pages are its default; these are the others it has. The last one tears pages apart, which none of
# SGLang's allocators does.
TORN_PAGES = "non_monotonic_extend"
SLOT_LAYOUTS = ("contiguous", "interleaved_pages", TORN_PAGES)
# Kinds of speculative decoding, and how many drafts follow one: two make a tree, which dflash does not have.
VERIFIED = (
    *((kind, topk) for kind in ("eagle", "frozen_kv_mtp", "ngram") for topk in (1, 2)),
    ("dflash", 1),
)
DRAFTED = tuple((topk, page_size) for topk, page_size in ((1, 1), (2, 1), (1, 16)))
"""Branches of a draft model and pages, for SGLang's own graph runners of drafting."""

Case = tuple[str, Callable[..., Any], int]

_block_sizes: set[int] = set()


def enumerate_cases(device: str) -> Iterator[Case]:
    """Every case by name, and the block size of its layouts; on a GPU also those that capture graphs."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graphs
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_extend_runner as draft_extend
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as draft
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verify
    from sglang.test.kits.attention_unittest.runner_modes import split_op_runner as split

    # Windows in decode are those of extend: a query sees as many keys whether it is alone or not.
    dense._SWA_DECODE_EXTEND_WINDOW = frozenset({*dense._SWA_DECODE_EXTEND_WINDOW, NAME})
    arguments: dict[str, Any] = {"device": device, "head_dim": 64}
    run_dense = partial(dense.run_dense_attention_case, **arguments)
    run_verify = partial(verify.run_dense_spec_verify_case, **arguments)
    run_graph = partial(graphs.run_dense_cuda_graph_decode_case, **arguments)
    run_verify_graph = partial(_in_order, verify, partial(verify.run_dense_spec_verify_cuda_graph_case, **arguments))
    run_extend_graph = partial(draft_extend.run_dense_draft_extend_v2_cuda_graph_case, **arguments)
    run_split = partial(split.run_dense_split_op_extend_case, **arguments)

    cases = dense.make_dense_cases(NAME)
    for case in cases:
        yield f"dense {case.name}", paged(partial(run_dense, case=case)), case.page_size
    for layout in SLOT_LAYOUTS:
        for case in cases:
            function = partial(run_dense, case=case, loc_layout=layout)
            torn = layout == TORN_PAGES
            yield f"{layout} {case.name}", function if torn else paged(function), 1 if torn else case.page_size
    windowed = (*dense.make_swa_no_prefix_input_config_cases(NAME), *dense.make_swa_prefix_input_config_cases(NAME))
    for case in windowed:
        yield f"window {case.name}", paged(partial(run_dense, case=case)), case.page_size
        decode = replace(case, name=case.name.replace("extend", "decode"), forward_mode=ForwardMode.DECODE)
        decode = replace(decode, prefix_lens=(3, 4, 5), extend_lens=())
        yield f"window {decode.name}", paged(partial(run_dense, case=decode)), case.page_size
    for mode in (ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DRAFT_EXTEND_V2):
        for case in (case for case in (*cases, *windowed) if case.forward_mode.is_extend()):
            function = partial(run_dense, case=replace(case, forward_mode=mode))
            yield f"{mode.name} {case.name}", paged(function), case.page_size
    for case in (case for case in (*cases, *windowed) if case.forward_mode.is_decode()):
        yield f"graph {case.name}", paged(partial(run_graph, case=case)), case.page_size
    for kind, topk in VERIFIED:
        for page_size, kv_heads, window in ((1, 4, None), (16, 4, None), (16, 2, None), (16, 4, 4), (32, 1, None)):
            name = f"{kind}_topk{topk}_page{page_size}_kv{kv_heads}_window{window}"
            case = dense.DenseAttentionCase(
                name=name,
                backend=NAME,
                forward_mode=ForwardMode.TARGET_VERIFY,
                num_heads=4,
                num_kv_heads=kv_heads,
                page_size=page_size,
                prefix_lens=(4, 16, 31),
                extend_lens=(3, 3, 3),
                sliding_window_size=window,
            )
            chain = topk == 1 and kind != "ngram"  # which says nothing of its shape
            for graph, function in (("", run_verify), ("graph ", run_verify_graph)):
                function = paged(partial(function, case=case, topk=topk, spec_kind=kind))
                yield f"{graph}TARGET_VERIFY {name}", function, page_size if chain else 1

    def drafting(mode: ForwardMode, name: str, page_size: int, lens: tuple[int, ...]) -> Any:
        return dense.DenseAttentionCase(
            name=name,
            backend=NAME,
            forward_mode=mode,
            num_heads=4,
            num_kv_heads=2,
            page_size=page_size,
            prefix_lens=(4, 16, 31),
            extend_lens=lens,
        )

    for pad_style in ("small_real", "prod_fill"):
        for page_size in (1, 16):
            name = f"DRAFT_EXTEND_V2 page{page_size}_{pad_style}"
            case = drafting(ForwardMode.DRAFT_EXTEND_V2, name, page_size, (3, 3, 3))
            function = paged(partial(run_extend_graph, case=case, pad_style=pad_style))
            yield f"graph {name}", function, page_size
    if device == "cpu":
        return
    for case in (case for case in (*cases, *windowed) if case.forward_mode.is_extend()):
        for breakable in (False, True):
            for padding in (0, 5):
                tokens = case.num_input_tokens + padding
                name = f"split {case.name} breakable_{breakable} padding_{padding}"
                function = paged(partial(run_split, case=case, breakable=breakable, static_num_tokens=tokens))
                yield name, function, case.page_size
    for topk, page_size in DRAFTED:
        name = f"topk{topk}_page{page_size}"
        case = drafting(ForwardMode.DECODE, name, page_size, ())
        run_draft = partial(draft.run_dense_eagle_draft_cuda_graph_runner_case, **arguments)
        yield f"captured draft {name}", paged(partial(run_draft, case=case, topk=topk)), page_size
        case = drafting(ForwardMode.DRAFT_EXTEND_V2, name, page_size, (3, 3, 3))
        run_extend = partial(draft_extend.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case, **arguments)
        yield f"captured DRAFT_EXTEND_V2 {name}", paged(partial(run_extend, case=case, topk=topk)), page_size


def _in_order(module: Any, function: Callable[..., Any], testcase: unittest.TestCase, **named: Any) -> None:
    """A case of which the kit writes prefixes where tokens lie in order, whatever its table says."""
    made = module.build_dense_attention_fixture
    with patch.object(module, made.__name__, partial(made, loc_layout="contiguous")):
        function(testcase, **named)


@contextmanager
def paged_pools() -> Iterator[None]:
    """The kit's runners have SGLang's allocator of pages. Their own is a namespace, of whose slots nothing is known."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.test.kits.attention_unittest.attention_methods.dense_attention import MockModelRunner

    plain = MockModelRunner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        pool = self.token_to_kv_pool
        self.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(
            pool.size, self.page_size, pool.dtype, pool.device, pool, need_sort=False
        )

    MockModelRunner.__init__ = init
    try:
        yield
    finally:
        MockModelRunner.__init__ = plain


def paged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The case in a paged pool."""

    def run_paged(test: unittest.TestCase) -> None:
        with paged_pools():
            function(test)

    return run_paged


def note_block_sizes() -> None:
    """From now on steps leave the block sizes of their layouts in `_block_sizes`."""
    from attnloom.backends.sglang.backend import AttnloomAttnBackend

    begin = AttnloomAttnBackend.begin

    def noting(self: Any, step: Any) -> None:
        begin(self, step)
        _block_sizes.update(layout.block_size for layout in step.layouts.values())

    AttnloomAttnBackend.begin = noting


def without_host_lengths() -> None:
    """From now on steps begin with what SGLang gives a backend that needs no lengths on the host: none."""
    from attnloom.backends.sglang.backend import AttnloomAttnBackend

    def without(begin: Callable[..., None]) -> Callable[..., None]:
        def bare(self: Any, forward_batch: Any, *more: Any, **named: Any) -> None:
            for name in ("seq_lens_cpu", "seq_lens_sum", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
                setattr(forward_batch, name, None)
            begin(self, forward_batch, *more, **named)

        return bare

    for name in ("init_forward_metadata_out_graph", "init_forward_metadata_in_graph"):
        setattr(AttnloomAttnBackend, name, without(getattr(AttnloomAttnBackend, name)))


def run(name: str, function: Callable[..., Any], host_lengths: bool) -> dict[str, Any]:
    """One case: how it ended, how often attnloom's kernel ran, with which blocks, and its processor time."""
    from attnloom.core.launch import run_count

    _block_sizes.clear()
    before = run_count()
    start = time.process_time()
    try:
        function(unittest.TestCase())
        outcome = "passed"
    except unittest.SkipTest as skip:
        outcome = f"skipped: {skip}"
    except Exception:
        outcome = f"failed: {traceback.format_exc()}"
    seconds = time.process_time() - start
    return {
        "case": name,
        "host_lengths": host_lengths,
        "outcome": outcome,
        "runs": run_count() - before,
        "block_sizes": sorted(_block_sizes),
        "seconds": seconds,
    }


def main() -> None:
    """Run every case with lengths on the host, then every case without."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    note_block_sizes()
    (device,) = json.loads(Path(sys.argv[1]).read_text()) or ["cpu"]
    cases = list(enumerate_cases(device))
    results = []
    for host_lengths in (True, False):
        if not host_lengths:
            without_host_lengths()
        results += [
            {**run(name, function, host_lengths), "block_size": block_size} for name, function, block_size in cases
        ]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
