"""What several backends answered in one case, as the judge sees it: what is wrong with ours, and how all did."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from integration_tests.compare import agreement
from integration_tests.models.folders import folder_of
from integration_tests.models.judge import Answers, Judge

BOUND = 0.05
"""How far logprobs may be off in any case."""
ROUNDINGS = 2.0
"""How often as far as those of transformers in the same 16 bits, which adds in another order."""


def judged(case: dict[str, Any], answers: dict[str, Answers]) -> tuple[list[str], str]:
    """Judge a case.

    Only our own answers can be wrong: how far other backends are from the judge is said, and no more. SGLang 0.5.17's
    triton, for one, sees a key less in decode than a window has, as SGLang's own conformance kit knows.

    Args:
        case: as vllm_gpu/case.py and sglang_gpu/case.py take them.
        answers: by backend, ours first.

    Returns:
        complaints, and lines that name every number.
    """
    engine, prompts, name = case["engine"], case["prompts"], case["name"]
    pairs = {f"{one} and {other}": agreement(answers[one], answers[other]) for one, other in combinations(answers, 2)}
    lines = [f"    {pair}: {found}" for pair, found in pairs.items()]
    if engine.get("load_format") == "dummy":  # weights that only the engine knows
        far = [line for line, found in zip(lines, pairs.values(), strict=True) if not found.apart <= BOUND]
        return [f"{name}: apart by more than {BOUND}: {line.strip()}" for line in far], "\n".join([f"{name}:", *lines])
    judge = Judge(folder_of(case["model"]), engine.get("dtype", "float16"), engine.get("kv_cache_dtype"))
    ours = next(iter(answers))
    rounding = judge.rounding(prompts, answers[ours])
    limit = max(BOUND, ROUNDINGS * rounding)
    verdicts = {backend: judge.verdict(prompts, given) for backend, given in answers.items()}
    complaints = []
    if not (verdicts[ours].off <= limit and verdicts[ours].behind <= 2 * limit):
        complaints.append(f"{name}: {ours} is wrong: {verdicts[ours]}; it may be off by {limit:.4f}")
    told = [f"{name}: transformers rounds by {rounding:.4f}, {ours} may be off by {limit:.4f}"]
    told += [f"    {backend}: {verdict}" for backend, verdict in verdicts.items()]
    return complaints, "\n".join(told + lines)
