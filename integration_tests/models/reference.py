"""What transformers answers: the reference of every serving framework."""

from __future__ import annotations

from typing import Any


def tokenize(case: dict[str, Any]) -> None:
    """Turn prompts that are texts into token ids, so that everybody answers the same."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    case["prompts"] = [
        [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in wave]
        for wave in case["prompts"]
    ]


def run_reference(case: dict[str, Any]) -> list[Any]:
    """The answers in float32, a prompt at a time, with transformers' plain attention.

    Args:
        case: `model` (a folder), `prompts` (waves of lists of token ids), `max_tokens`, `embed` (no tokens, but
            embeddings).
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModel if case.get("embed") else AutoModelForCausalLM
    model = auto.from_pretrained(case["model"], dtype=torch.float32, attn_implementation="eager").eval()
    answers: list[Any] = []
    with torch.inference_mode():
        for ids in (ids for wave in case["prompts"] for ids in wave):
            tokens = torch.tensor([ids])
            if case.get("embed"):
                # What vLLM's `embed` gives for this kind of model: the first token's state, normalised.
                answers.append(torch.nn.functional.normalize(model(tokens).last_hidden_state[0, 0], dim=0).tolist())
                continue
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=case["max_tokens"],
                max_new_tokens=case["max_tokens"],
            )
            answers.append(output[0, len(ids) :].tolist())
    return answers
