"""The judge of backends tells answers of the model from answers of a model that sees one key less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests import judged
from integration_tests.models import tiny
from integration_tests.models.judge import Answers, Judge
from integration_tests.models.prompts import random_prompts
from integration_tests.running import MODELS

PROMPTS = random_prompts(3, 40)
TOKENS = 6


def answered(folder: str, dtype: torch.dtype, **config: Any) -> Answers:
    """What transformers answers, greedily, a token at a time and without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **config).eval()
    answers: Answers = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        steps: list[dict[str, float]] = []
        for _ in range(TOKENS):
            with torch.inference_mode():
                found = model(torch.tensor([prompt + tokens])).logits[0, -1].float().log_softmax(-1).topk(5)
            steps.append(
                {str(int(token)): float(each) for token, each in zip(found.indices, found.values, strict=True)}
            )
            tokens.append(int(found.indices[0]))
        answers.append({"tokens": tokens, "logprobs": steps})
    return answers


@pytest.fixture(scope="module")
def windows() -> str:
    return str(tiny.build("windows", MODELS))


def case(**engine: Any) -> dict[str, Any]:
    return {"name": "case", "model": "windows", "prompts": PROMPTS, "engine": engine}


def test_the_model_itself_is_right(windows: str) -> None:
    """In two rounds, of which the second gives no logprobs; and as a backend of 16 bits would have it."""
    answers = answered(windows, torch.float32)
    judge = Judge(windows, "float32")
    verdict = judge.verdict(PROMPTS, answers + [{"tokens": answer["tokens"]} for answer in answers])
    assert verdict.steps == 2 * len(PROMPTS) * TOKENS
    assert verdict.off < 1e-4 and verdict.behind < 1e-4
    assert judge.rounding(PROMPTS, answers) == 0.0

    rounded = Judge(windows, "bfloat16")
    assert 0.0 < rounded.verdict(PROMPTS, answered(windows, torch.bfloat16)).off < judged.BOUND
    assert 0.0 < rounded.rounding(PROMPTS, answers) < judged.BOUND


def test_a_window_that_is_one_key_short_is_wrong(windows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = answered(windows, torch.bfloat16), answered(windows, torch.bfloat16, sliding_window=23)
    assert json.loads((Path(windows) / "config.json").read_text())["sliding_window"] == 24
    monkeypatch.setattr(judged, "folder_of", lambda model: windows)
    complaints, told = judged.judged(case(dtype="bfloat16"), {"ours": right, "theirs": wrong})
    assert complaints == [] and "theirs: logprobs off" in told and "ours and theirs: Agreement" in told
    (complaint,), _ = judged.judged(case(dtype="bfloat16"), {"ours": wrong, "theirs": right})
    assert "ours is wrong" in complaint


def test_a_token_that_is_not_the_likeliest_is_behind(windows: str) -> None:
    """Whether or not logprobs say so."""
    answers = [{"tokens": answer["tokens"]} for answer in answered(windows, torch.float32)]
    answers[1]["tokens"][2] = (answers[1]["tokens"][2] + 1) % tiny.VOCABULARY
    verdict = Judge(windows, "float32").verdict(PROMPTS, answers)
    assert verdict.behind > 0.1 and verdict.worst == (1, 2)


def test_nan_is_wrong(windows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = answered(windows, torch.float32)
    answers[0]["logprobs"][1] = dict.fromkeys(answers[0]["logprobs"][1], float("nan"))
    monkeypatch.setattr(judged, "folder_of", lambda model: windows)
    complaints, _ = judged.judged(case(dtype="float32"), {"ours": answers})
    assert len(complaints) == 1


def test_eight_bit_caches_round_keys_and_values() -> None:
    """Answers with a cache of 16 bits are off then, and by more than rounding does."""
    folder = str(tiny.build("head128", MODELS))
    answers = answered(folder, torch.float32)
    assert Judge(folder, "float16").verdict(PROMPTS, answers).off < judged.BOUND
    judge = Judge(folder, "float16", "fp8_e5m2")
    assert judge.verdict(PROMPTS, answers).off > judge.rounding(PROMPTS, answers) > judged.BOUND
