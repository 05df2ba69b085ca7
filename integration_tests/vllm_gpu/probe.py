"""A vLLM worker extension (`worker_extension_cls`) that says which attention ran, and what it cost the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


class Probe:
    """Mixed into a vLLM worker; vLLM calls its methods by name in every worker process."""

    model_runner: Any

    def probe_attention(self) -> dict[str, Any]:
        """The engine's classes of layers and model runner; runs of kernels in the process."""
        from attnloom.core.launch import run_count

        return {
            "impls": sorted({type(layer.impl).__name__ for layer in _layers(self.model_runner)}),
            "layers": len(_layers(self.model_runner)),
            "runs": run_count(),
            "runner": type(self.model_runner).__module__,
        }

    def probe_time_host(self) -> None:
        """From now on the builders' and the layers' calls are timed by the host's clock."""
        times: dict[str, list[float]] = {"build": [], "append": [], "attention": []}
        Probe.times = times

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter()
                result = call(*args, **kwargs)
                times[name].append(time.perf_counter() - began)
                return result

            return called

        for builder in _builders(self.model_runner):
            builder.build = timed("build", builder.build)
        for layer in _layers(self.model_runner):
            layer.impl.forward = timed("attention", layer.impl.forward)
            if hasattr(layer.impl, "do_kv_cache_update"):
                layer.impl.do_kv_cache_update = timed("append", layer.impl.do_kv_cache_update)

    def probe_host_us(self) -> dict[str, float]:
        """Median microseconds of a call of each kind since probe_time_host."""
        return {name: 1e6 * statistics.median(taken) for name, taken in Probe.times.items() if taken}


def _layers(runner: Any) -> list[Any]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    return list(get_layers_from_vllm_config(runner.vllm_config, Attention).values())


def _builders(runner: Any) -> list[Any]:
    groups = [group for groups in runner.attn_groups for group in groups]
    return [builder for group in groups for builder in group.metadata_builders]
