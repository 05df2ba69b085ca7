"""Models of transformers with another attention, in plain torch: the reference of variants that are served."""

from __future__ import annotations

from typing import Any

import torch

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


def replaced_answers(case: dict[str, Any]) -> list[list[int]]:
    """What transformers answers where layer i computes what `case["attention"][i]` says."""
    from transformers import AttentionInterface

    AttentionInterface.register("replaced", attention(case["attention"]))
    return answers(case, "replaced")
