"""What is run: tiny models with random weights, each case once under either of vLLM's model runners."""

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


def case(name: str, model: str, backends: tuple[str, ...] = OWN, **engine: Any) -> dict[str, Any]:
    """Prompts that end inside, at and after a page, a window, a tile and a chunk."""
    return {
        "name": name,
        "model": model,
        "prompts": random_prompts(1, 7, 16, 64, 65, 150, 300, 700),
        "max_tokens": 24,
        "engine": engine,
        "backends": ("CUSTOM", *backends),
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
    )
}
