"""What attnloom does not serve, vLLM refuses to start with, for a reason in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.models import tiny
from integration_tests.running import MODELS
from integration_tests.vllm_cpu.running import environment, run_program

pytest.importorskip("vllm")


def selector(**changes: Any) -> list[str]:
    """The reasons against a layer that is served, but for the changes."""
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from attnloom.backends.vllm.backend import AttnloomBackend

    config = AttentionSelectorConfig(64, torch.bfloat16, "auto", None)._replace(**changes)
    return AttnloomBackend.validate_configuration(device_capability=None, **config._asdict())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"use_non_causal": True},
        {"block_size": 1},
        {"block_size": 528},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": None},
        {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder"},
    ],
)
def test_served(changes: dict[str, Any]) -> None:
    assert selector(**changes) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_size": 72}, "head_size 72 is not supported, only 64, 80, 96, 112, 128, 192, 256"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 is not supported here"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 is not supported here"),
        ({"attn_type": "encoder"}, "attention type encoder is not supported"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse attention"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head scales"),
        ({"use_batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"use_kv_connector": True}, "KV connectors"),
        ({"use_pcp": True}, "prefill context parallelism"),
        ({"use_dcp": True}, "decode context parallelism"),
        ({"use_adaptive_verification": True}, "adaptive verification"),
        ({"use_rswa": True}, "R-SWA"),
    ],
)
def test_refused_in_words(changes: dict[str, Any], words: str) -> None:
    (reason,) = selector(**changes)
    assert words in reason


def test_several_reasons_and_unknown_flags() -> None:
    import torch

    from attnloom.backends.vllm.support import refusals

    reasons = refusals(
        head_size=72, dtype=torch.float64, kv_cache_dtype="auto", attn_type="decoder", use_time_travel=True
    )
    assert len(reasons) == 3
    assert "use_time_travel=True is not known" in reasons[2]


def test_engines_stop_before_they_are_healthy(tmp_path: Path) -> None:
    """Real engines, one after the other in one process."""
    model = str(tiny.build("head128", MODELS))
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    tasks: list[dict[str, Any]] = [
        {"engine": {"model": model, "kv_cache_dtype": "fp8"}},
        {"engine": {"model": model}, "environment": {"VLLM_BATCH_INVARIANT": "1"}},
        {"engine": {"model": model, "kv_transfer_config": connector}},
        {"engine": {"model": str(tiny.build("head32", MODELS))}},
        {"engine": {"model": str(tiny.build("latent", MODELS))}},
    ]
    said = run_program("integration_tests.vllm_cpu.refuse", tasks, tmp_path)
    words = [
        "kv_cache_dtype fp8 is not supported here",
        "VLLM_BATCH_INVARIANT is not supported yet",
        "KV connectors",
        "head_size 32 is not supported",
        "(MLA) is not supported yet",
    ]
    for message, expected in zip(said, words, strict=True):
        assert message is not None and expected in message, message


def test_vllm_serve_exits_with_the_reason(tmp_path: Path) -> None:
    """The command that users run, with all its processes, ends with an error and says why.

    VLLM_TARGET_DEVICE=cpu makes vLLM 0.32 skip every platform plugin: the general plugin alone has to see to it that
    CUSTOM is not quietly replaced.
    """
    vllm = str(Path(sys.executable).parent / "vllm")
    model = str(tiny.build("head128", MODELS))
    arguments = ["--attention-backend", "CUSTOM", "--kv-cache-dtype", "fp8", "--enforce-eager", "--port", "0"]
    done = subprocess.run(
        [vllm, "serve", model, *arguments],
        cwd=tmp_path,
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_TARGET_DEVICE="cpu"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "kv_cache_dtype fp8 is not supported here" in done.stdout + done.stderr
