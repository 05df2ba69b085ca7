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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

NAME = "attnloom"
DENSE = "sglang.test.kits.attention_unittest.attention_methods.dense_attention"
# The kit's shuffled pages are its default; these are the others it has.
SLOT_LAYOUTS = ("contiguous", "interleaved_pages", "non_monotonic_extend")
# Kinds of speculative decoding, and how many drafts follow one: two make a tree, which dflash does not have.
VERIFIED = (
    *((kind, topk) for kind in ("eagle", "frozen_kv_mtp", "ngram") for topk in (1, 2)),
    ("dflash", 1),
)
GRAPHS = "needs CUDA graphs"

Case = tuple[str, Callable[..., Any] | None]


def enumerate_cases() -> Iterator[Case]:
    """Every case by name; None instead of a function for what needs CUDA graphs."""
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
        yield f"dense {case.name}", partial(run_dense, case=case)
    for layout in SLOT_LAYOUTS:
        for case in cases:
            yield f"{layout} {case.name}", partial(run_dense, case=case, loc_layout=layout)
    windowed = (*dense.make_swa_no_prefix_input_config_cases(NAME), *dense.make_swa_prefix_input_config_cases(NAME))
    for case in windowed:
        yield f"window {case.name}", partial(run_dense, case=case)
        decode = replace(case, name=case.name.replace("extend", "decode"), forward_mode=ForwardMode.DECODE)
        yield f"window {decode.name}", partial(run_dense, case=replace(decode, prefix_lens=(3, 4, 5), extend_lens=()))
    for mode in (ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DRAFT_EXTEND_V2):
        for case in (case for case in (*cases, *windowed) if case.forward_mode.is_extend()):
            yield f"{mode.name} {case.name}", partial(run_dense, case=replace(case, forward_mode=mode))
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
            yield f"TARGET_VERIFY {name}", partial(run_verify, case=case, topk=topk, spec_kind=kind)
    yield "CUDA graph decode", None


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
    """One case: how it ended, how often attnloom's kernel ran, and the processor time that it took."""
    from attnloom.core.launch import run_count

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
        "seconds": seconds,
    }


def main() -> None:
    """Run every case with lengths on the host, then every case without."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    cases = list(enumerate_cases())
    results = [run(*case, True) for case in cases]
    without_host_lengths()
    results += [run(*case, False) for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
