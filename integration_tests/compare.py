"""Greedy answers of two backends side by side: how far their logprobs are apart, and whether they part at ties only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Agreement:
    """What two backends' answers to the same prompts have in common.

    Attributes:
        steps: at which both had seen the same tokens; compared.
        apart: the largest difference of a logprob that both name there.
        parted: prompts whose answers differ at some step.
        gap: the largest difference between the logprobs of the two tokens chosen where they part, as either sees it;
            0 at an exact tie.
    """

    steps: int
    apart: float
    parted: int
    gap: float


def agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Agreement:
    """Answers as vllm_gpu/case.py and sglang_gpu/engine.py give them; those without logprobs are not compared."""
    steps, apart, parted, gap = 0, 0.0, 0, 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if "logprobs" not in mine or "logprobs" not in other:
            continue
        for step, (token, wanted) in enumerate(zip(mine["tokens"], other["tokens"], strict=True)):
            here, there = mine["logprobs"][step], other["logprobs"][step]
            common = here.keys() & there.keys()
            if not common:
                return Agreement(steps, float("inf"), parted, float("inf"))
            steps += 1
            apart = max(apart, *(abs(here[name] - there[name]) for name in common))
            if token == wanted:
                continue
            parted += 1
            for seen in (here, there):
                # A token that is not among the five likeliest is no tie.
                pair = [seen.get(str(choice), float("-inf")) for choice in (token, wanted)]
                gap = max(gap, abs(pair[0] - pair[1]))
            break
    return Agreement(steps, apart, parted, gap)
