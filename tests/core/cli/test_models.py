"""From a model's configuration to kernels: head sizes, dtypes, hooks; and the same as the backend asks for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from attnloom.backends.vllm.variant import layer_variant as backend_variant
from attnloom.core.cli.build import _specs
from attnloom.core.cli.catalogue import DTYPES
from attnloom.core.cli.models import layer_variant, needs
from attnloom.core.serving import Choice, Table
from attnloom.core.variants import Full

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 256, "attn_logit_softcapping": 50.0, "sliding_window": 4096}
# What is in a config.json -> (kernel names, head sizes, dtypes).
MODELS: dict[str, tuple[dict[str, object], set[tuple[str, int, str]]]] = {
    "llama": (LLAMA, {("plain", 128, "bfloat16")}),
    "own head size": ({**LLAMA, "head_dim": 64}, {("plain", 64, "bfloat16")}),
    "head_dim null": ({**LLAMA, "head_dim": None}, {("plain", 128, "bfloat16")}),
    "dtype, as newer files call it": ({**LLAMA, "torch_dtype": None, "dtype": "float16"}, {("plain", 128, "float16")}),
    "float32 is served in bfloat16": ({**LLAMA, "torch_dtype": "float32"}, {("plain", 128, "bfloat16")}),
    "no dtype": ({**LLAMA, "torch_dtype": "auto"}, {("plain", 128, "bfloat16")}),
    "gemma 2": (GEMMA2, {("soft_cap", 256, "bfloat16")}),
    "gemma 3": (
        {"model_type": "gemma3", "text_config": {**GEMMA2, "attn_logit_softcapping": None}},
        {("plain", 256, "bfloat16")},
    ),
    "gemma 4": (
        {"text_config": {**LLAMA, "head_dim": 256, "global_head_dim": 192}},
        {("plain", 256, "bfloat16"), ("plain", 192, "bfloat16")},
    ),
    "gpt-oss": ({**LLAMA, "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}, {("sinks", 64, "bfloat16")}),
    "sinks in sliding layers": (
        {**LLAMA, "add_swa_attention_sink_bias": True},
        {("sinks", 128, "bfloat16"), ("plain", 128, "bfloat16")},
    ),
    "bloom": (
        {"model_type": "bloom", "n_head": 16, "hidden_size": 1024, "torch_dtype": "float16"},
        {("alibi", 64, "float16")},
    ),
    "falcon with ALiBi": ({**LLAMA, "model_type": "falcon", "alibi": True}, {("alibi", 128, "bfloat16")}),
    "gpt-2": ({"model_type": "gpt2", "n_head": 12, "n_embd": 768}, {("plain", 64, "bfloat16")}),
}


def write(folder: Path, config: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_needs(tmp_path: Path, name: str) -> None:
    config, expected = MODELS[name]
    found = needs(write(tmp_path, config))
    assert {(need.variant.kernel_name, need.head_dim, need.dtype.name) for need in found} == expected
    assert len(found) == len(expected)
    assert needs(tmp_path) == found, "the folder of a model will do"


def test_another_dtype(tmp_path: Path) -> None:
    (need,) = needs(write(tmp_path, LLAMA), DTYPES["fp32"])
    assert need.dtype is DTYPES["fp32"]
    assert _specs([need])[1].name == "cpu_attention_f32_d128_plain"


@pytest.mark.parametrize(("cap", "alibi", "sinks"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 64])
def test_the_backend_asks_for_the_same_kernels(
    cap: bool, alibi: bool, sinks: bool, causal: bool, window: int | None
) -> None:
    """Its engines, causal and bidirectional, windowed or not: what is compiled is one kernel, and it is this one."""
    import torch

    from attnloom.core.kernels import attention_spec

    asked = backend_variant(causal=causal, sliding_window=window, soft_cap=cap, alibi=alibi, sinks=sinks)
    ours = layer_variant(soft_cap=cap, alibi=alibi, sinks=sinks)
    specs = [attention_spec("cpu", torch.bfloat16, 128, 128, variant) for variant in (asked, ours)]
    assert specs[0] == specs[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a model's config.json"),
        ("[]", "which is an object"),
        ("[" * 100_000, "recursion depth.*: expected a model's config.json"),
        ("{}", "expected head_dim, or hidden_size and num_attention_heads"),
        (json.dumps({**LLAMA, "kv_lora_rank": 512}), "multi-head latent attention is not supported yet"),
        (json.dumps({**LLAMA, "torch_dtype": "float64"}), "dtype 'float64': expected one of .*--dtype names another"),
    ],
)
def test_other_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        needs(file)


def test_what_no_kernel_serves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"head_dim=100 \(causal\): expected one of \(64, 80,"):
        _specs(needs(write(tmp_path, {**LLAMA, "head_dim": 100})))


def test_patterns_that_match_no_layer(tmp_path: Path) -> None:
    file = write(tmp_path, {**LLAMA, "num_hidden_layers": 2})
    deeper = Choice((Table("serve.toml: variant 1", Full(), ("*.layers.7.*",)),))
    with pytest.raises(
        ValueError, match=r"config.json: serve.toml: variant 1: layers: '\*.layers.7.\*' matches no layer"
    ):
        needs(file, None, deeper)
    strange = Choice((Table("serve.toml: variant 1", Full(), ("tower.7.*",)),))
    assert all(
        "'tower.7.*' matches no name of a layer that is known" in need.why for need in needs(file, None, strange)
    )
    known = Choice((Table("serve.toml: variant 1", Full(), ("*.layers.1.*",)),))
    assert not any("matches no" in need.why for need in needs(file, None, known))
