"""SGLang's own conformance kit for attention backends, `sglang.test.kits.attention_unittest`, for attnloom on a CPU.

Writes a JSON list with one entry for each case: `python -m integration_tests.sglang_cpu.kit TASK.json RESULT.json`;
the task is `[]`. The kit has references of its own and makes the backend by its name from SGLang's registry. Its heads
are of 64 here: its default of 16 is smaller than any that attnloom has kernels for.
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
GRAPHS = "needs CUDA graphs"

Case = tuple[str, Callable[..., Any] | None, int]

_block_sizes: set[int] = set()


def enumerate_cases() -> Iterator[Case]:
    """Every case by name, and the block size of its layouts; None instead of a function for what needs CUDA graphs."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verify

    # Windows in decode are those of extend: a query sees as many keys whether it is alone or not.
    dense._SWA_DECODE_EXTEND_WINDOW = frozenset({*dense._SWA_DECODE_EXTEND_WINDOW, NAME})
    arguments: dict[str, Any] = {"device": "cpu", "head_dim": 64}
    run_dense = partial(dense.run_dense_attention_case, **arguments)
    run_verify = partial(verify.run_dense_spec_verify_case, **arguments)

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
            function = paged(partial(run_verify, case=case, topk=topk, spec_kind=kind))
            yield f"TARGET_VERIFY {name}", function, page_size if chain else 1
    yield "CUDA graph decode", None, 1


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

    def noting(self: Any, step: Any, forward_batch: Any) -> None:
        begin(self, step, forward_batch)
        _block_sizes.update(layout.block_size for layout in step.layouts.values())

    AttnloomAttnBackend.begin = noting


def without_host_lengths() -> None:
    """From now on steps begin with what SGLang gives a backend that needs no lengths on the host: none."""
    from attnloom.backends.sglang.backend import AttnloomAttnBackend

    begin = AttnloomAttnBackend.init_forward_metadata_out_graph

    def bare(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        for name in ("seq_lens_cpu", "seq_lens_sum", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
            setattr(forward_batch, name, None)
        begin(self, forward_batch, in_capture)

    AttnloomAttnBackend.init_forward_metadata_out_graph = bare


def run(name: str, function: Callable[..., Any] | None, host_lengths: bool) -> dict[str, Any]:
    """One case: how it ended, how often attnloom's kernel ran, with which blocks, and its processor time."""
    from attnloom.core.launch import run_count

    _block_sizes.clear()
    before = run_count()
    start = time.process_time()
    try:
        if function is None:
            raise unittest.SkipTest(GRAPHS)
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
    cases = list(enumerate_cases())
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
