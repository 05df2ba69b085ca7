"""A vLLM worker extension that proves which attention backend ran.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls its methods in every worker process by name.
"""

from __future__ import annotations

from typing import Any


class Probe:
    """Counts attention calls and model steps in the worker it is mixed into."""

    model_runner: Any

    def probe_start(self, forbid: str = "") -> dict[str, int]:
        """Begin to count. `forbid="CPU_ATTN"` makes vLLM's own CPU attention raise if anything calls it."""
        import vllm._custom_ops as ops

        from attnloom import Attention

        if not hasattr(Probe, "counts"):
            Probe.counts = {"steps": 0, "cpu_attn": 0, "masked": 0, "hidden_tiles": 0}
            Probe.original = ops.cpu_attention_with_kv_cache
            Probe.plan = Attention.plan
        counts = Probe.counts

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts["cpu_attn"] += 1
            if forbid == "CPU_ATTN":
                raise AssertionError("vLLM's own CPU attention ran although attnloom was asked for")
            return Probe.original(*args, **kwargs)

        def planned(engine: Attention, *args: Any, **kwargs: Any) -> Any:
            """Counts plans with a block mask, and the KV tiles that the mask saves them."""
            plan = Probe.plan(engine, *args, **kwargs)
            if kwargs.get("block_mask") is not None:
                counts["masked"] += 1
                without = Probe.plan(engine, *args, **{**kwargs, "block_mask": None})
                counts["hidden_tiles"] += int(without.worker_tiles().sum()) - int(plan.worker_tiles().sum())
            return plan

        Attention.plan = planned

        # Not a forward hook: models that vLLM compiles call their own forward directly.
        model = self.model_runner.model
        forward = model.forward

        def stepped(*args: Any, **kwargs: Any) -> Any:
            counts["steps"] += 1
            return forward(*args, **kwargs)

        ops.cpu_attention_with_kv_cache = counted
        model.forward = stepped
        return self.probe_read()

    def probe_read(self) -> dict[str, int]:
        """The counts so far: model steps, runs of attnloom's kernel, calls of vLLM's own, attention layers."""
        import torch
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        from attnloom.core.launch import run_count

        layers = get_layers_from_vllm_config(self.model_runner.vllm_config, Attention)
        return {
            **Probe.counts,
            "attnloom": run_count(),
            "layers": len(layers),
            "threads": torch.get_num_threads(),
        }

    def probe_variants(self) -> dict[str, str]:
        """For every layer the name of the variant that its engine computes in causal steps."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        layers = get_layers_from_vllm_config(self.model_runner.vllm_config, Attention)
        return {name: layer.impl.engines[True].variant.name for name, layer in layers.items()}
