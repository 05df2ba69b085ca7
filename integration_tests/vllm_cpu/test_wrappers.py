"""Layers that subclass the backend, its builder and its metadata give what they give around vLLM's own attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from integration_tests.models import tiny
from integration_tests.running import MODELS
from integration_tests.vllm_cpu.running import run_program


def test_cross_chunked_local_and_fast_prefill(tmp_path: Path) -> None:
    """Cross attention, chunked-local attention, and prefill of the wanted tokens only."""
    model = str(tiny.build("head128", MODELS))
    layers = ("cross", "chunked_local", "fast_prefill")
    tasks = [{"model": model, "layer": layer} for layer in layers]
    results = run_program("integration_tests.vllm_cpu.wrappers", tasks, tmp_path)
    for layer, result in zip(layers, results, strict=True):
        ours, theirs = np.array(result["CUSTOM"]), np.array(result["CPU_ATTN"])
        assert ours.size > 0 and np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=layer)
