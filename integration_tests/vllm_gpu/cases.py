"""What is run: tiny models with random weights, each case once under those of vLLM's model runners that take it."""

from __future__ import annotations

from typing import Any

from integration_tests.models.prompts import random_prompts

OWN = ("FLASH_ATTN", "TRITON_ATTN")

EAGER: dict[str, Any] = {"enforce_eager": True}

DECODE_GRAPHS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
    "max_num_seqs": 8,
}

ALL_GRAPHS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
"""Steps of prefill and decode in graphs too."""


NGRAMS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
}
"""Drafts out of the text: mostly wrong ones."""

DRAFT_MODEL: dict[str, Any] = {
    "speculative_config": {"method": "draft_model", "model": "head128", "num_speculative_tokens": 3}
}
"""The model drafts for itself: mostly right ones."""

DRAFT_GRAPHS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8, 16, 32]},
    "max_num_seqs": 8,
}
"""Of steps that verify a token and three drafts of each request."""


RUNNERS = {"1": "vllm.v1.worker.gpu.model_runner", "0": "vllm.v1.worker.gpu_model_runner"}
"""Modules of the model runners by VLLM_USE_V2_MODEL_RUNNER."""


def case(name: str, model: str, backends: tuple[str, ...] = OWN, **engine: Any) -> dict[str, Any]:
    """Prompts that end inside, at and after a page, a window, a tile and a chunk."""
    return {
        "name": name,
        "model": model,
        "prompts": random_prompts(1, 7, 16, 64, 65, 150, 300, 700),
        "max_tokens": 24,
        "engine": engine,
        "backends": ("CUSTOM", *backends),
        # The newer runner takes neither ngrams nor draft models in 0.26.
        "runners": ["0"] if "speculative_config" in engine else [*RUNNERS],
    }


CHUNKS = {"max_num_batched_tokens": 96, "max_num_seqs": 8}

CASES = {
    made["name"]: made
    for made in (
        case("eager", "head128", **EAGER),
        # vLLM wants bfloat16 of this architecture.
        case("windows", "windows", **EAGER, **CHUNKS, dtype="bfloat16"),
        case("chunked", "group7", ("FLASH_ATTN",), **EAGER, **CHUNKS),
        case("e4m3", "head128", ("TRITON_ATTN",), **EAGER, kv_cache_dtype="fp8"),
        case("e5m2", "head128", (), **EAGER, kv_cache_dtype="fp8_e5m2"),  # none of vLLM 0.26's own takes them
        case("graphs", "head128", ("FLASH_ATTN",), **DECODE_GRAPHS),
        case("mixed graphs", "head128", ("FLASH_ATTN",), **ALL_GRAPHS),
        case("window graphs", "windows", ("FLASH_ATTN",), **DECODE_GRAPHS, dtype="bfloat16"),
        case("drafts", "head128", ("FLASH_ATTN",), **EAGER, **DRAFT_MODEL),
        case("draft graphs", "head128", ("FLASH_ATTN",), **DRAFT_GRAPHS, **DRAFT_MODEL),
        # As many drafts as there happen to be: steps are not uniform.
        case("ngram graphs", "head128", ("FLASH_ATTN",), **ALL_GRAPHS, **NGRAMS),
    )
}
