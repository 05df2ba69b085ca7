"""Attention layers that vLLM builds around a backend, one by one, without a model: outputs of both backends.

    python -m integration_tests.vllm_cpu.wrappers TASKS.json RESULTS.json

A task: `model` (whose configuration is borrowed) and `layer`: cross, chunked_local or fast_prefill. A result: for each
backend the layer's output as nested lists.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, HEAD_SIZE, PAGE, PAGES = 4, 2, 128, 32, 24
SCALE = HEAD_SIZE**-0.5


@dataclass
class Step:
    """One step: its metadata as the model runner gives it, and the new tokens of the layer."""

    common: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def step(query_lens: list[int], seq_lens: list[int], **more: Any) -> Step:
    """Requests with pages in a shuffled order; positions of the new tokens are the last of each sequence."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    torch.manual_seed(7)
    indptr = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    table = torch.randperm(PAGES).to(torch.int32).view(len(seq_lens), -1)
    slots = [
        int(table[row, at // PAGE]) * PAGE + at % PAGE
        for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for at in range(length - new, length)
    ]
    tokens = int(indptr[-1])
    common = CommonAttentionMetadata(
        query_start_loc=indptr,
        query_start_loc_cpu=indptr,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(seq_lens),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        causal=True,
        **more,
    )
    query = torch.randn(tokens, HEADS * HEAD_SIZE)
    key, value = torch.randn(2, tokens, KV_HEADS * HEAD_SIZE)
    return Step(common, query, key, value)


def cross(config: Any) -> tuple[Any, Step]:
    """Decoder queries on encoder keys: one request in its first step brings 40 of them, one has 70 in the cache."""
    import numpy as np
    from vllm.model_executor.layers.attention import CrossAttention

    encoder = [40, 70]
    made = step(
        [3, 1],
        [3, 9],
        encoder_seq_lens=torch.tensor(encoder, dtype=torch.int32),
        encoder_seq_lens_cpu=np.array(encoder, dtype=np.int32),
    )
    made.key, made.value = torch.randn(2, encoder[0], KV_HEADS * HEAD_SIZE)
    layer = CrossAttention(HEADS, HEAD_SIZE, SCALE, config.cache_config, num_kv_heads=KV_HEADS, prefix="layers.0.attn")
    return layer, made


def chunked_local(config: Any) -> tuple[Any, Step]:
    """Attention inside chunks of 64 tokens: vLLM cuts requests into virtual ones."""
    from vllm.model_executor.layers.attention import ChunkedLocalAttention

    layer = ChunkedLocalAttention(
        HEADS, HEAD_SIZE, SCALE, 64, KV_HEADS, cache_config=config.cache_config, prefix="layers.0.attn"
    )
    return layer, step([100, 1, 7], [150, 200, 64])


def fast_prefill(config: Any) -> tuple[Any, Step]:
    """A layer that runs only for the tokens whose logits are wanted, on metadata in a class made by vLLM."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    layer = Attention(HEADS, HEAD_SIZE, SCALE, KV_HEADS, cache_config=config.cache_config, prefix="layers.0.attn")
    layer.attn_backend = create_fast_prefill_custom_backend("FastPrefill", layer.attn_backend)
    wanted = torch.tensor([9, 14], dtype=torch.int32)
    made = step([10, 5], [50, 5], logits_indices_padded=wanted, num_logits_indices=wanted.numel(), max_logits_per_req=1)
    made.query = made.query[wanted]
    return layer, made


LAYERS: dict[str, Callable[[Any], tuple[Any, Step]]] = {
    make.__name__: make for make in (cross, chunked_local, fast_prefill)
}


def run(task: dict[str, Any], backend: str) -> Any:
    """The layer's output with one backend, through vLLM's own operator and forward context."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context

    config = EngineArgs(
        model=task["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=PAGE,
        attention_config={"backend": backend},
    ).create_engine_config()
    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(config), torch.no_grad():
        layer, made = LAYERS[task["layer"]](config)
        spec = layer.get_kv_cache_spec(config)
        torch.manual_seed(11)
        logical = torch.randn(PAGES, KV_HEADS, PAGE, 2 * HEAD_SIZE)
        layer.kv_cache = stored(logical, backend)
        builder = layer.attn_backend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))
        metadata = builder.build(0, made.common)
        name = layer.layer_name
        with set_forward_context({name: metadata}, config, slot_mapping={name: made.common.slot_mapping}):
            return layer(made.query, made.key, made.value).tolist()


def stored(logical: torch.Tensor, backend: str) -> torch.Tensor:
    """The same keys and values as each backend keeps them: CPU_ATTN packs the halves of a page in its own way."""
    if backend == "CUSTOM":
        return logical
    from vllm.platforms import current_platform

    packed = logical.clone()
    current_platform.pack_kv_cache(packed, torch.arange(PAGES))
    return packed


def main() -> None:
    """Run the tasks named on the command line."""
    source, target = map(Path, sys.argv[1:])
    tasks = json.loads(source.read_text())
    target.write_text(
        json.dumps([{backend: run(task, backend) for backend in ("CUSTOM", "CPU_ATTN")} for task in tasks])
    )


if __name__ == "__main__":
    main()
