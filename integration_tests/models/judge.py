"""A judge of backends: transformers in float32, shown the very tokens that a backend answered.

Two backends that differ may both be wrong, or be right and have rounded; and once they have parted, neither says
anything of the other. Here each is compared with the model itself, at every step. How much rounding does, the judge
says too: transformers in the 16 bits of the backends is off by about as much as a right backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from integration_tests.models.replaced import attention

Answers = list[dict[str, Any]]
"""For each prompt `tokens` and, where the backend gives them, `logprobs`: for each step the likeliest by token."""

EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""KV caches by their names in vLLM and SGLang, with scales of 1."""


@dataclass(frozen=True)
class Verdict:
    """How far a backend's answers are from the judge's.

    Attributes:
        steps: that were compared.
        off: the largest difference of a logprob that the backend names from the judge's of the same token.
        mean: of all such differences.
        behind: how far the judge has a token that the backend chose behind the likeliest, at most.
        worst: answer and step where `off` is, from 0; where no logprobs are named, where `behind` is.
    """

    steps: int
    off: float
    mean: float
    behind: float
    worst: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"logprobs off by {self.off:.4f} (mean {self.mean:.4f}, worst in answer {self.worst[0]} at step "
            f"{self.worst[1]}), tokens behind by {self.behind:.4f} in {self.steps} steps"
        )


class Judge:
    """One model.

    Args:
        folder: of a model of transformers, float32.
        dtype: of the backends ("float16", "bfloat16", "float32"), to which they round the weights.
        kv_cache: a name of EIGHT_BITS where keys and values are rounded, which needs a model of causal attention
            without windows and caps; None: they are not.
    """

    def __init__(self, folder: str, dtype: str, kv_cache: str | None = None) -> None:
        self.folder = folder
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.kv_cache = EIGHT_BITS[kv_cache] if kv_cache is not None else None
        self.model = self._load(torch.float32)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(self.dtype))

    def verdict(self, prompts: list[list[int]], answers: Answers) -> Verdict:
        """Judge the answers to prompts, which may have been asked in several rounds."""
        off: list[tuple[float, tuple[int, int]]] = []
        behind: list[tuple[float, tuple[int, int]]] = []
        for nth, answer in enumerate(answers):
            tokens = answer["tokens"]
            expected = _log_probs(self.model, prompts[nth % len(prompts)], tokens)
            for step, (row, token) in enumerate(zip(expected, tokens, strict=True)):
                behind.append((float(row.max() - row[token]), (nth, step)))
                named = answer["logprobs"][step] if "logprobs" in answer else {}
                off += [(abs(logprob - float(row[int(name)])), (nth, step)) for name, logprob in named.items()]
        most, worst = _largest(off or behind)
        mean = sum(each for each, _ in off) / len(off) if off else 0.0
        return Verdict(len(behind), most if off else 0.0, mean, _largest(behind)[0], worst)

    def rounding(self, prompts: list[list[int]], answers: Answers, likeliest: int = 5) -> float:
        """How far the logprobs of transformers in the backends' dtype are off, at the first answer to each prompt."""
        rounded = self._load(self.dtype)
        most = 0.0
        for prompt, answer in zip(prompts, answers, strict=False):
            expected, found = (_log_probs(model, prompt, answer["tokens"]) for model in (self.model, rounded))
            named = found.topk(likeliest, -1).indices
            most = max(most, float((expected - found).gather(1, named).abs().max()))
        return most

    def _load(self, dtype: torch.dtype) -> Any:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        implementation = "eager"
        if self.kv_cache is not None:
            implementation = f"kv_cache_in_{self.kv_cache}".replace("torch.", "")
            AttentionInterface.register(implementation, _rounding_keys(self.kv_cache))
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation=implementation).eval()


def _largest(found: list[tuple[float, tuple[int, int]]]) -> tuple[float, tuple[int, int]]:
    """A NaN is larger than any number."""
    return max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0])


def _log_probs(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Float32 ``[tokens answered, vocabulary]``: before each token of the answer."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt + answer[:-1]])).logits
    return logits[0, len(prompt) - 1 :].float().log_softmax(-1)


def _rounding_keys(kv_cache: torch.dtype) -> Any:
    """Plain causal attention over keys and values of eight bits."""

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = attention(["softmax"] * (module.layer_idx + 1))
        key, value = (each.to(kv_cache).to(each.dtype) for each in (key, value))
        return plain(module, query, key, value, *args, **kwargs)

    return forward
