"""Variants of a user's own, served by vLLM: tokens equal those of a plain torch model with that attention."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from integration_tests.models import tiny
from integration_tests.running import MODELS, ROOT
from integration_tests.vllm_cpu.running import run_program
from integration_tests.vllm_cpu.test_tokens import tiny_case

LAYER = "model.layers.{}.self_attn.attn"

# Layer 0 as the model has it; layer 1 sees a window, through a range that is declared and a parameter; layer 2 sigmoid.
BY_LAYER = f"""
[[variant]]
name = "capped_window"
layers = "*.layers.1.*"
params = {{ cap = 3.0, window = 16 }}
logits_transform = "return params.cap * tanh(logits / params.cap);"
logits_mask = "return q_pos - kv_pos < params.window;"
visible = "return Range{{q_first - int(params.window) + 1, q_last + 1}};"

[[variant]]
use = "{ROOT / "examples" / "sigmoid.py"}:sigmoid"
layers = ["{LAYER.format(2)}"]
params = {{ bias = -2.0 }}
"""


# What an installed package may offer: functions as users of FlexAttention write them. The window declares no range.
PACKAGE = """
import torch
from attnloom import Variant


def squashed(score, b, h, q_idx, kv_idx):
    return torch.sigmoid(score - 2.0)


def capped(score, b, h, q_idx, kv_idx):
    return 3.0 * torch.tanh(score / 3.0)


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 16


squash = Variant("installed_squash", logits_transform=squashed, use_softmax=False)


def window():
    return Variant("installed_window", logits_transform=capped, logits_mask=near)
"""


def install(folder: Path) -> Path:
    """A package with entry points, as pip leaves it: what importlib.metadata finds beside the module."""
    site = folder / "site"
    information = site / "attentions-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: attentions\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[attnloom.variants]\nsquash = attentions.served:squash\nnear_and_capped = attentions.served:window\n"
    )
    package = site / "attentions"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "served.py").write_text(PACKAGE)
    return site


def served(file: Path, attention: list[str], **engine: Any) -> dict[str, Any]:
    """The tiny Qwen 3 with the variants of a file."""
    option = {"attnloom": {"variants": str(file)}}
    return {**tiny_case("head128", additional_config=option, **engine), "attention": attention}


def check(result: dict[str, Any], names: list[str]) -> None:
    """attnloom ran these variants in every layer and step; the tokens are the plain model's, and not the usual ones."""
    (variants,) = result["CUSTOM"]["variants"]
    assert variants == {LAYER.format(n): name for n, name in enumerate(names)}
    (worker,) = result["CUSTOM"]["workers"]
    assert worker["steps"] > 0 and worker["layers"] == len(names)
    assert worker["attnloom"] == worker["layers"] * worker["steps"] and worker["cpu_attn"] == 0
    assert result["CUSTOM"]["answers"] == result["reference"]
    assert all(ours != usual for ours, usual in zip(result["reference"], result["usual"], strict=True))


def test_sigmoid_in_every_layer_and_a_choice_by_layer(tmp_path: Path) -> None:
    """The file of examples/; then three layers that differ, in chunks of 32 tokens."""
    by_layer = tmp_path / "by_layer.toml"
    by_layer.write_text(BY_LAYER)
    cases = [
        served(ROOT / "examples" / "serve.toml", ["sigmoid"] * 3),
        served(
            by_layer, ["softmax", "capped_window", "sigmoid"], max_num_batched_tokens=32, max_num_seqs=4, block_size=32
        ),
    ]
    results = run_program("integration_tests.vllm_cpu.custom", cases, tmp_path)
    check(results[0], ["causal_sigmoid"] * 3)
    check(results[1], ["causal", "causal_capped_window", "causal_sigmoid"])


def test_variants_of_an_installed_package(tmp_path: Path) -> None:
    """By the names of its entry points, in the option and in a file; a mask without a range skips what it hides."""
    site = install(tmp_path)
    by_layer = tmp_path / "by_layer.toml"
    by_layer.write_text('[[variant]]\nuse = "near_and_capped"\nlayers = ["*.layers.1.*", "*.layers.2.*"]\n')
    option = {"attnloom": {"variants": "squash"}}
    cases = [
        {**tiny_case("head128", additional_config=option), "attention": ["sigmoid"] * 3},
        served(by_layer, ["softmax", "capped_window", "capped_window"], max_num_batched_tokens=32, max_num_seqs=4),
    ]
    path = os.pathsep.join(map(str, (ROOT, site)))
    results = run_program("integration_tests.vllm_cpu.custom", cases, tmp_path, PYTHONPATH=path)
    check(results[0], ["causal_installed_squash"] * 3)
    check(results[1], ["causal", "causal_installed_window", "causal_installed_window"])
    counted = [result["CUSTOM"]["workers"][0] for result in results]
    assert counted[0]["masked"] == 0, "sigmoid hides nothing"
    assert counted[1]["masked"] == counted[1]["steps"], "its layers share a plan"
    assert counted[1]["hidden_tiles"] > counted[1]["steps"]


def test_engines_stop_with_the_file_and_the_key(tmp_path: Path) -> None:
    """Nothing of a wrong choice is served, or ignored."""
    bad = {
        "unknown key": '[[variant]]\nuse = "causal"\nlayer = "*"\n',
        "no such layer": '[[variant]]\nuse = "soft_cap"\nlayers = "*.layer.1.*"\nparams.logit_cap = 9.0\n',
        "no value": '[[variant]]\nuse = "soft_cap"\n',
        "compiler": '[[variant]]\nlogits_transform = "return logits + no_such_name;"\n',
    }
    words = {
        "unknown key": "variant 1: layer: unknown, expected use",
        "no such layer": "variant 1: layers: '*.layer.1.*' matches none of ['model.layers.0.self_attn.attn'",
        "no value": "variant 1: causal_soft_cap: params=[]: expected ['logit_cap'], missing ['logit_cap']",
        "compiler": "no_such_name",
    }
    model = str(tiny.build("head128", MODELS))
    tasks: list[dict[str, Any]] = []
    for name, text in bad.items():
        file = tmp_path / f"{name.replace(' ', '_')}.toml"
        file.write_text(text)
        tasks.append({"engine": {"model": model, "additional_config": {"attnloom": {"variants": str(file)}}}})
    # Refused although vLLM's own attention is asked for: it would not know of the variants.
    ignored = {"model": model, "additional_config": {"attnloom": {"variants": "causal"}}}
    tasks.append({"engine": ignored, "backend": "CPU_ATTN"})
    said = run_program("integration_tests.vllm_cpu.refuse", tasks, tmp_path)
    for message, name in zip(said, bad, strict=False):
        assert message is not None and words[name] in message, message
        if name != "compiler":
            assert f"{tmp_path / name.replace(' ', '_')}.toml" in message
    assert said[-1] is not None and "expected --attention-backend CUSTOM with it" in said[-1]
