"""SmolLM2's real weights on a GPU, in bfloat16 with decode graphs: what it answers to questions in words.

    python -m integration_tests.vllm_gpu.real

prints the answers of attnloom and of FLASH_ATTN, and how far they agree.
"""

from __future__ import annotations

from typing import Any

from integration_tests.models import smollm2
from integration_tests.models.folders import FOLDER
from integration_tests.vllm_gpu.case import run_backend
from integration_tests.vllm_gpu.cases import DECODE_GRAPHS
from integration_tests.vllm_gpu.summary import summary

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "Explain in two sentences why bread rises.",
)


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2.convert(FOLDER / "SmolLM2-135M-Instruct")))


def case() -> dict[str, Any]:
    """As case.py takes it. Raises FileNotFoundError where the weights are not installed."""
    model = str(smollm2.convert(FOLDER / "SmolLM2-135M-Instruct"))
    words = tokenizer()
    texts = [
        words.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        for question in QUESTIONS
    ]
    return {
        "name": "SmolLM2",
        "model": model,
        "prompts": [words.encode(text, add_special_tokens=False) for text in texts],
        "max_tokens": 48,
        "engine": {**DECODE_GRAPHS, "dtype": "bfloat16"},
        "backends": ["CUSTOM", "FLASH_ATTN"],
    }


def main() -> None:
    asked, words = case(), tokenizer()
    result: dict[str, Any] = {"name": asked["name"]}
    for backend in asked["backends"]:
        result[backend] = run_backend(asked, backend)
        for answer in result[backend]["answers"]:
            print(f"{backend}: {words.decode(answer['tokens'])!r}", flush=True)
    print(summary(result))


if __name__ == "__main__":
    main()
