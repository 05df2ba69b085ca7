"""Models whose attention is replaced: vLLM with a variant of attnloom, and transformers with plain torch code.

    python -m integration_tests.vllm_cpu.custom CASES.json RESULTS.json

A case: those of case.py, and `attention`, for each layer the name of a function below. The variants are in its
`engine`, as vLLM's option `additional_config`. A result: `CUSTOM` as in case.py, `reference` and `usual`: what
transformers answers with that attention and with the model's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from integration_tests.vllm_cpu.case import run_backend

WINDOW = 16


def softmax(scores: torch.Tensor, seen: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """The usual weights."""
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def sigmoid(scores: torch.Tensor, seen: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """Weights that need not sum to 1; the bias is that of examples/serve.toml."""
    return torch.sigmoid(scores - 2.0).masked_fill(~seen, 0.0)


def capped_window(scores: torch.Tensor, seen: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """A soft cap of 3 and a window of WINDOW keys."""
    return softmax(3.0 * torch.tanh(scores / 3.0), seen & (behind < WINDOW), behind)


FUNCTIONS = {function.__name__: function for function in (softmax, sigmoid, capped_window)}


def attention(names: list[str]) -> Any:
    """An attention function of transformers that computes for layer i what names[i] says, in plain torch."""

    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        new, length = query.shape[2], key.shape[2]
        behind = torch.arange(length - new, length)[:, None] - torch.arange(length)
        weights = FUNCTIONS[names[module.layer_idx]](query @ key.transpose(2, 3) * scaling, behind >= 0, behind)
        return (weights @ value).transpose(1, 2).contiguous(), None

    return forward


def answers(case: dict[str, Any], implementation: str) -> list[list[int]]:
    """What transformers answers in float32, a prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        case["model"], dtype=torch.float32, attn_implementation=implementation
    ).eval()
    found = []
    with torch.inference_mode():
        for ids in (ids for wave in case["prompts"] for ids in wave):
            tokens = torch.tensor([ids])
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=case["max_tokens"],
                max_new_tokens=case["max_tokens"],
            )
            found.append(output[0, len(ids) :].tolist())
    return found


def main() -> None:
    """Run the cases named on the command line."""
    from transformers import AttentionInterface

    source, target = map(Path, sys.argv[1:])
    results = []
    for number, case in enumerate(json.loads(source.read_text())):
        result: dict[str, Any] = {"CUSTOM": run_backend(case, "CUSTOM")}
        AttentionInterface.register(f"custom_{number}", attention(case["attention"]))
        result["reference"] = answers(case, f"custom_{number}")
        result["usual"] = answers(case, "eager")
        results.append(result)
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
