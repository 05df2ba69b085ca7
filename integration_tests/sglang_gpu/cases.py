"""What is run: tiny models with random weights, and a large one without any where there is its configuration.

    python -m integration_tests.sglang_gpu.cases [NAME ...] > CASES.json

ATTNLOOM_TEST_LLAMA names a folder with the configuration of Llama 3.1 8B; weights are made up, and mean nothing.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

from integration_tests.models.prompts import random_prompts

LLAMA = os.environ.get("ATTNLOOM_TEST_LLAMA")


def case(name: str, model: str, *, logprobs: bool = True, **engine: Any) -> dict[str, Any]:
    """Prompts that end inside, at and after a page, a window, a tile and a chunk."""
    return {
        "name": name,
        "model": model,
        "prompts": random_prompts(1, 7, 16, 64, 65, 150, 300, 700),
        "max_tokens": 24,
        "engine": engine,
        "backends": ["attnloom", "triton"],
        "logprobs": logprobs,
        "limit_s": 300,
    }


def drafting(steps: int, topk: int, drafts: int) -> dict[str, Any]:
    """The model drafts for itself. SGLang does not return logprobs of drafts in all of its versions."""
    return {
        "logprobs": False,
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": "head128",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": drafts,
    }


def llama(folder: str) -> dict[str, Any]:
    """Also timed, with 64 prompts of 512 to 2048 tokens."""
    draw = random.Random(0)
    return {
        **case(
            "llama",
            folder,
            dtype="bfloat16",
            load_format="dummy",
            context_length=8192,
            max_total_tokens=400_000,
            max_running_requests=64,
            cuda_graph_max_bs_decode=64,
        ),
        "timed": {"prompts": [draw.randint(512, 2048) for _ in range(64)], "steps": 64, "vocabulary": 128_000},
        "limit_s": 580,
    }


EAGER: dict[str, Any] = {"disable_cuda_graph": True}
CHUNKS: dict[str, Any] = {"chunked_prefill_size": 96, "enable_mixed_chunk": True}

CASES = {
    made["name"]: made
    for made in (
        case("graphs", "head128"),
        case("eager", "head128", **EAGER),
        case("pages and chunks", "group7", page_size=16, **CHUNKS),
        case("windows", "windows", dtype="bfloat16"),
        case("two pools", "two_pools", swa_full_tokens_ratio=0.5, page_size=16, **CHUNKS),
        case("e4m3", "head128", kv_cache_dtype="fp8_e4m3"),
        case("e5m2", "head128", kv_cache_dtype="fp8_e5m2"),
        case("prefill graphs", "head128", disable_prefill_cuda_graph=False, cuda_graph_max_bs_prefill=256),
        case("chain of drafts", "head128", **drafting(2, 1, 3)),
        case("tree of drafts", "head128", **drafting(3, 2, 6)),
        case("eager drafts", "head128", **drafting(3, 2, 6), **EAGER),
        *([llama(LLAMA)] if LLAMA else []),
    )
}


def main() -> None:
    """Print the cases that are named, or all."""
    print(json.dumps([CASES[name] for name in sys.argv[1:] or CASES]))


if __name__ == "__main__":
    main()
