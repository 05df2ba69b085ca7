"""Tokens from SGLang with attnloom equal those of Hugging Face transformers in float32, in two rounds.

The second round of the same prompts finds them in the radix cache. A probe in the scheduler counts which attention ran,
in every engine of every test.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from integration_tests.models import tiny
from integration_tests.running import ROOT, run_program
from integration_tests.sglang_cpu.probe import DEVICE_STEPS
from integration_tests.sglang_cpu.running import environment

CHUNKS = {"chunked_prefill_size": 32, "enable_mixed_chunk": True}


def case(model: str, **engine: Any) -> dict[str, Any]:
    """A tiny model, asked twice; prompts end inside, at and after a page, a window and a tile."""
    draw = random.Random(2024)
    prompts = [[0, *(draw.randrange(3, tiny.VOCABULARY) for _ in range(length - 1))] for length in (1, 7, 64, 150)]
    return {"model": model, "prompts": [prompts, prompts], "max_tokens": 24, "engine": engine}


def check(result: dict[str, Any], decode: bool = True, extend: bool = True, page_size: int = 1, pools: int = 1) -> None:
    """The reference's tokens; the second round from the cache; by attnloom in the steps that it was chosen for.

    Every step read blocks of page_size in every pool, whose tokens SGLang kept together.
    """
    assert result["answers"] == result["reference"]
    first, second = result["cached_tokens"]
    assert first < 10 and second >= 150  # chunks of one round share the first token alone
    counts = result["counts"]
    decoded = counts["layer_runs"] // counts["steps"] * counts["DECODE steps"] if counts.get("DECODE steps") else 0
    ours = (decoded if decode else 0) + (counts["layer_runs"] - decoded if extend else 0)
    assert counts["attnloom"] == ours > 0, counts
    assert counts.get("torch_native", 0) == counts["layer_runs"] - ours, counts
    assert counts.get("triton", 0) == 0, counts
    assert counts["pages looked at"] > 0 == counts["torn pages"], counts
    blocks = {name: count for name, count in counts.items() if name.startswith("blocks of ")}
    assert list(blocks) == [f"blocks of {page_size}"], counts
    if decode and extend:
        assert blocks[f"blocks of {page_size}"] == pools * counts["steps"], counts


def run_cases(*cases: dict[str, Any], folder: Path, **extra: str) -> list[dict[str, Any]]:
    return run_program("integration_tests.sglang_cpu.case", list(cases), folder, environment(**extra))


def test_pages_and_chunks(tmp_path: Path) -> None:
    """14 query heads on 2 KV heads; pages of 1 and 16; prompts in chunks, in steps with requests that decode."""
    whole, chunked = run_cases(case("group7"), case("group7", page_size=16, **CHUNKS), folder=tmp_path)
    check(whole)
    check(chunked, page_size=16)
    assert chunked["counts"]["MIXED steps"] > 0


def test_windows_under_a_soft_cap(tmp_path: Path) -> None:
    """Gemma 2."""
    (result,) = run_cases(case("windows", page_size=16), folder=tmp_path)
    check(result, page_size=16)


def test_windows_with_a_pool_of_their_own(tmp_path: Path) -> None:
    """Mellum, its windowed layers in a smaller pool with slots of its own, which forgets what they left.

    By slots, by pages smaller than a window, and by pages longer than one.
    """
    sizes = (1, 16, 32)
    pools = {**CHUNKS, "swa_full_tokens_ratio": 0.5}
    results = run_cases(*(case("two_pools", **pools, page_size=size) for size in sizes), folder=tmp_path)
    for result, size in zip(results, sizes, strict=True):
        check(result, page_size=size, pools=2)


def test_windows_with_a_pool_of_their_own_as_on_a_gpu(tmp_path: Path) -> None:
    """As above with what a GPU does otherwise: how slots are translated, and a scheduler that is a step ahead."""
    pools = {**CHUNKS, "swa_full_tokens_ratio": 0.5, "disable_overlap_schedule": False}
    cases = [case("two_pools", **pools, page_size=size) for size in (1, 16)]
    results = run_cases(*cases, folder=tmp_path, **{DEVICE_STEPS: "1"})
    for result, size in zip(results, (1, 16), strict=True):
        check(result, page_size=size, pools=2)
        counts = result["counts"]
        assert counts["translations as on a GPU"] == counts["steps"] and counts["MIXED steps"] > 0, counts


def test_attnloom_for_prefill_or_for_decode_only(tmp_path: Path) -> None:
    """The other half of the work is torch_native's."""
    names = {"attention_backend": None, "prefill_attention_backend": "attnloom"}
    prefill, decode = run_cases(
        case("head128", **names, decode_attention_backend="torch_native"),
        case("head128", **{**names, "prefill_attention_backend": "torch_native"}, decode_attention_backend="attnloom"),
        folder=tmp_path,
    )
    check(prefill, decode=False)
    check(decode, extend=False)


def test_speculative_decoding(tmp_path: Path) -> None:
    """Trees of drafts by a draft model: one step and three, each draft followed by two; then a chain."""
    drafting = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "head128"}

    def drafted(steps: int, topk: int, drafts: int, **more: Any) -> dict[str, Any]:
        shape = {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": drafts,
        }
        return case("head128", **drafting, **shape, **more)

    results = run_cases(drafted(1, 2, 3), drafted(3, 2, 6), drafted(2, 1, 3, page_size=16), folder=tmp_path)
    for result, page_size in zip(results, (1, 1, 16), strict=True):
        check(result, page_size=page_size)
        assert result["counts"]["TARGET_VERIFY steps"] > 0
        assert result["counts"]["DRAFT_EXTEND_V2 steps"] > 0
        # The draft model is the model itself, so drafts are accepted: not all, since SGLang drafts without a prompt's
        # first token, and requests that begin alike share what their drafts begin with.
        tokens = len(result["answers"][0])
        assert max(result["verified"]) < tokens - 1
        assert min(result["verified"]) <= tokens // 2 + 1


def test_tensor_parallel(tmp_path: Path) -> None:
    """Two ranks with half of the heads each, a core each; the probe answers for the first."""
    (result,) = run_cases(case("group7", tp_size=2), folder=tmp_path, SGLANG_CPU_OMP_THREADS_BIND="0|1")
    check(result)


def test_custom_variants(tmp_path: Path) -> None:
    """The file of examples/: sigmoid attention in every layer, named in the model's configuration."""
    chosen = json.dumps({"attnloom": {"variants": str(ROOT / "examples" / "serve.toml")}})
    (result,) = run_cases(
        {**case("head128", json_model_override_args=chosen), "attention": ["sigmoid"] * 3}, folder=tmp_path
    )
    check(result)
