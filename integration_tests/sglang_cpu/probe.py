"""A plugin of SGLang that proves which attention backend ran.

It counts in SGLang's scheduler, the process with the model, and answers with what SGLang calls its internal state
(`Engine.get_server_info()`, `GET /server_info`). SGLang finds it through the metadata in `plugins/`. Where the variable
DEVICE_STEPS is set, the slots of windowed layers are translated on a CPU as on a GPU.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

DEVICE_STEPS = "ATTNLOOM_TEST_DEVICE_STEPS"

counts: Counter[str] = Counter()


def register() -> None:
    """`sglang.srt.plugins`: begin to count."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    for target, name in (
        (f"{native}.forward_decode", "torch_native"),
        (f"{native}.forward_extend", "torch_native"),
        ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_decode", "triton"),
        ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_extend", "triton"),
    ):
        HookRegistry.register(target, _counting(name), HookType.BEFORE)
    windowed = "attnloom.backends.sglang.windowed.WindowedSteps.translate"
    HookRegistry.register(windowed, _counting("translations as on a GPU"), HookType.BEFORE)
    if os.environ.get(DEVICE_STEPS):
        HookRegistry.register("attnloom.backends.sglang.backend.HostWindowedSteps", _device_steps, HookType.REPLACE)
    HookRegistry.register("attnloom.backends.sglang.backend.AttnloomAttnBackend.begin", _begin, HookType.AFTER)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", _step, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _answer, HookType.AFTER)


def _counting(name: str) -> Any:
    def count(*args: Any, **kwargs: Any) -> None:
        counts[name] += 1

    return count


def _device_steps(table: Any, reach: int, *, sees_every_step: bool) -> Any:
    from attnloom.backends.sglang.windowed import WindowedSteps

    return WindowedSteps(table, reach)


def _begin(output: Any, backend: Any, step: Any, *args: Any, **kwargs: Any) -> None:
    """A step of attnloom's: how many tokens the blocks of its layouts have, and whether SGLang keeps these together."""
    for pool, layout in step.layouts.items():
        size = layout.block_size
        counts[f"blocks of {size}"] += 1
        if step.rows.device.type != "cpu":
            continue  # a graph may be captured just now, and nothing may be read back
        for nth, (row, length) in enumerate(zip(step.rows.tolist(), step.kv_lens.tolist(), strict=True)):
            begin, slots = 0, backend.req_to_token_pool.req_to_token[row, :length].long()
            if pool.name == "WINDOWED":
                queries = int(step.qo_indptr[nth + 1] - step.qo_indptr[nth])
                begin = max(0, length - queries - backend.windowed.reach) // size
                slots = backend.token_to_kv_pool.full_to_swa_index_mapping[slots].long()
            for page in slots.split(size)[begin:]:
                counts["pages looked at"] += 1
                counts["torn pages"] += int(((page - page[0]).tolist() != [*range(len(page))]) or int(page[0]) == 0)


def _step(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """One forward pass of a model: of which kind, and how many layers with attention it runs."""
    from sglang.srt.layers.radix_attention import RadixAttention

    mode = forward_batch.forward_mode.name
    layers = sum(isinstance(module, RadixAttention) for module in runner.model.modules())
    counts["steps"] += 1
    counts["layer_runs"] += 0 if mode == "IDLE" else layers
    counts[f"{mode} steps"] += 1


def _answer(output: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's answer, with the counts so far beside what SGLang says itself."""
    import torch

    from attnloom.core.launch import run_count

    output.internal_state["probe"] = {**counts, "attnloom": run_count(), "threads": torch.get_num_threads()}
