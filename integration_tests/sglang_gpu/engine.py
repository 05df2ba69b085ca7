"""One model under one attention backend of SGLang, in a process of its own.

    python -m integration_tests.sglang_gpu.engine TASK.json RESULT.json

The task is `[case, backend]`, a case as case.py takes it; the result is a list of one, which says what was answered,
which attention ran, and how long it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from integration_tests.models.folders import folder_of
from integration_tests.models.prompts import random_prompts

SETTINGS: dict[str, Any] = {
    "dtype": "float16",
    "context_length": 1024,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,
    "cuda_graph_max_bs_decode": 8,
    "disable_prefill_cuda_graph": True,
    "skip_tokenizer_init": True,
    "random_seed": 0,
    "log_level": "info",
}
"""What a case does not say otherwise. Few and small graphs: an engine starts in half a minute."""


def answered(outputs: list[Any], logprobs: bool) -> list[dict[str, Any]]:
    """For each prompt the tokens, and at each of them the likeliest with their logprobs."""
    answers = []
    for output in outputs:
        answer: dict[str, Any] = {"tokens": output["output_ids"]}
        if logprobs:
            steps = output["meta_info"]["output_top_logprobs"]
            answer["logprobs"] = [{str(token): logprob for logprob, token, *_ in step} for step in steps]
        answers.append(answer)
    return answers


def flush(engine: Any) -> None:
    """Empty the radix cache, as soon as the step has ended that SGLang had begun when it knew the last answer."""
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("SGLang did not empty its cache within 10 s")


def timed(engine: Any, lengths: list[int], steps: int, vocabulary: int) -> dict[str, float]:
    """Seconds of a prefill and of a decode step: a run that stops after the first token, and one that goes on."""
    prompts = random_prompts(*lengths, vocabulary=vocabulary)
    taken = []
    for count in (1, steps, 1, steps):  # the first two compile what is compiled when it is first needed
        flush(engine)
        began = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=sampling(count))
        taken.append(time.perf_counter() - began)
    prefill, whole = taken[2:]
    return {"prefill_tokens_per_s": sum(lengths) / prefill, "decode_step_ms": 1e3 * (whole - prefill) / (steps - 1)}


def sampling(tokens: int) -> dict[str, Any]:
    """Greedy."""
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


def counts(engine: Any) -> dict[str, int]:
    """What the probe of sglang_cpu/probe.py has counted in the scheduler so far."""
    found: dict[str, int] = engine.get_server_info()["internal_states"][0]["probe"]
    return found


def run_engine(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """Rounds of the prompts; then times, where asked for.

    The second round finds the prompts in the radix cache. In the third it is empty again, and no logprobs are asked
    for: SGLang does not mix chunks of prompts with requests that decode where they are.
    """
    import sglang

    settings = SETTINGS | case.get("engine", {})
    if (draft := settings.get("speculative_draft_model_path")) is not None:
        settings["speculative_draft_model_path"] = folder_of(draft)
    began = time.perf_counter()
    engine = sglang.Engine(model_path=folder_of(case["model"]), attention_backend=backend, **settings)
    try:
        result: dict[str, Any] = {"start_s": time.perf_counter() - began, "before": counts(engine)}
        answers, cached = [], []
        for logprobs in (case.get("logprobs", True), case.get("logprobs", True), False):
            more = {"return_logprob": True, "top_logprobs_num": 5} if logprobs else {}
            if len(cached) == 2:
                flush(engine)
            outputs = engine.generate(input_ids=case["prompts"], sampling_params=sampling(case["max_tokens"]), **more)
            answers += answered(outputs, logprobs)
            cached.append(sum(output["meta_info"]["cached_tokens"] for output in outputs))
        result |= {"answers": answers, "cached_tokens": cached, "after": counts(engine)}
        result["served_s"] = time.perf_counter() - began - result["start_s"]
        if (asked := case.get("timed")) is not None:
            result |= timed(engine, asked["prompts"], asked["steps"], asked["vocabulary"])
        return result
    finally:
        engine.shutdown()


def main() -> None:
    """Run the task named on the command line."""
    source, target = map(Path, sys.argv[1:])
    case, backend = json.loads(source.read_text())
    target.write_text(json.dumps([run_engine(case, backend)]))


if __name__ == "__main__":
    main()
