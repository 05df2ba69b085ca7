"""Tokens from vLLM with attnloom equal those of vLLM's own CPU attention and of Hugging Face transformers, in float32.

One process a test: starting vLLM takes longer than answering. In each, a probe in the workers counts which attention
ran, and vLLM's own raises if it is called while attnloom is being tested.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from integration_tests.models import smollm2, tiny
from integration_tests.running import MODELS
from integration_tests.vllm_cpu.running import run_program

STORY = (
    "A weaver kept two looms in her workshop. On the first she made plain cloth for the market, quickly and without "
    "thinking. On the second she worked at night, slowly, with threads of every colour that she had saved from the "
    "first. People who passed her window asked what the second cloth was for. "
)


def random_prompts(*lengths: int) -> list[list[int]]:
    """Prompts of the given lengths over the vocabulary of the tiny models, the same every time."""
    draw = random.Random(2024)
    return [[0, *(draw.randrange(3, tiny.VOCABULARY) for _ in range(length - 1))] for length in lengths]


def tiny_case(name: str, **engine: Any) -> dict[str, Any]:
    """A tiny model with prompts that end inside, at and after a page, a window and a tile."""
    return {
        "model": str(tiny.build(name, MODELS)),
        "prompts": [random_prompts(1, 7, 64, 150)],
        "max_tokens": 24,
        "engine": engine,
    }


def check_who_ran(result: dict[str, Any]) -> None:
    """The asked-for attention ran once per layer and step in every worker, and the other one never."""
    for backend, ran, rested in (("CUSTOM", "attnloom", "cpu_attn"), ("CPU_ATTN", "cpu_attn", "attnloom")):
        for worker in result[backend]["workers"]:
            assert worker["steps"] > 0
            assert worker[ran] == worker["layers"] * worker["steps"], (backend, worker)
            assert worker[rested] == 0, (backend, worker)


def check_tokens(results: list[dict[str, Any]]) -> None:
    """Everybody gave the same tokens, by the asked-for attention."""
    for result in results:
        check_who_ran(result)
        assert result["CUSTOM"]["answers"] == result["CPU_ATTN"]["answers"]
        assert result["CUSTOM"]["answers"] == result["reference"]


def run_cases(*cases: dict[str, Any], folder: Path, **extra: str) -> list[dict[str, Any]]:
    return run_program("integration_tests.vllm_cpu.case", list(cases), folder, **extra)


def test_smollm2_with_chunked_prefill_and_prefix_cache_hits(tmp_path: Path) -> None:
    """The real model. 64 tokens a step split the long prompts; the second wave finds the first one's pages."""
    case = {
        "model": str(smollm2.convert(MODELS / "SmolLM2-135M-Instruct")),
        "prompts": [
            ["The capital of France is", STORY, STORY + STORY + "She said:", "1"],
            [STORY + "One day a child asked", STORY + STORY + "She answered:", "The capital of France is"],
        ],
        "max_tokens": 16,
        "engine": {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32},
    }
    results = run_cases(case, folder=tmp_path)
    check_tokens(results)
    assert results[0]["CUSTOM"]["cached_tokens"] >= 64
    assert results[0]["CUSTOM"]["cached_tokens"] == results[0]["CPU_ATTN"]["cached_tokens"]


def test_windows_soft_cap_sinks_and_alibi(tmp_path: Path) -> None:
    """Sliding-window and full layers in one model, under a soft cap, with sinks; then ALiBi.

    Without vLLM's hybrid cache manager the windowed and the full layers share a group: one plan for each window.
    """
    one_group = tiny_case("windows", disable_hybrid_kv_cache_manager=True)
    check_tokens(run_cases(tiny_case("windows"), one_group, tiny_case("sinks"), tiny_case("alibi"), folder=tmp_path))


def test_group_of_seven(tmp_path: Path) -> None:
    """14 query heads on 2 KV heads; pages that are no multiple of a tile."""
    check_tokens(run_cases(tiny_case("group7", block_size=96), folder=tmp_path))


def test_head_dim_128(tmp_path: Path) -> None:
    """Heads of 128, in steps of at most 32 tokens."""
    check_tokens(run_cases(tiny_case("head128", max_num_batched_tokens=32, max_num_seqs=4), folder=tmp_path))


def test_encoder_only(tmp_path: Path) -> None:
    """Embeddings of a bidirectional encoder with symmetric windows; keys and values come from no cache."""
    case = {
        "model": str(tiny.build("encoder", MODELS)),
        "prompts": [random_prompts(3, 7, 64, 150)],
        "embed": True,
    }
    (result,) = run_cases(case, folder=tmp_path)
    check_who_ran(result)
    for ours, theirs, reference in zip(
        result["CUSTOM"]["answers"], result["CPU_ATTN"]["answers"], result["reference"], strict=True
    ):
        assert math.dist(ours, theirs) < 1e-5
        assert math.dist(ours, reference) < 1e-5


def test_tensor_parallel(tmp_path: Path) -> None:
    """Two workers with half of the heads each, a core each."""
    results = run_cases(tiny_case("group7", tensor_parallel_size=2), folder=tmp_path, VLLM_CPU_OMP_THREADS_BIND="0|1")
    check_tokens(results)
    assert len(results[0]["CUSTOM"]["workers"]) == 2
