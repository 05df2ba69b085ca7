"""Models in SGLang engines, one after the other: the prompts of each, and what transformers answers.

Reads a JSON list of cases and writes a JSON list of results:

    python -m integration_tests.sglang_cpu.case CASES.json RESULTS.json

A case: `model` (a folder, or the name of a tiny model), `prompts` (waves, one after the other, of texts or lists of
token ids), `max_tokens`, `engine` (arguments of sglang.Engine); where its layers compute something else than the model
has, `attention`, for each layer the name of a function in models/replaced.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from integration_tests.models import tiny
from integration_tests.models.reference import run_reference, tokenize
from integration_tests.models.replaced import replaced_answers
from integration_tests.running import MODELS


def run_engine(case: dict[str, Any]) -> dict[str, Any]:
    """Every wave of prompts through one engine; what it answered and what its scheduler counted."""
    import sglang

    engine = sglang.Engine(
        **{
            "model_path": case["model"],
            "attention_backend": "attnloom",
            "dtype": "float32",
            "device": "cpu",
            "disable_overlap_schedule": True,
            "context_length": 512,
            "max_total_tokens": 4096,
            "max_running_requests": 8,
            "log_level": "info",
        }
        | case.get("engine", {})
    )
    try:
        before = engine.get_server_info()["internal_states"][0]["probe"]
        sampling = {"temperature": 0.0, "max_new_tokens": case["max_tokens"], "ignore_eos": True}
        answers, cached, verified = [], [], []
        for wave in case["prompts"]:
            outputs = engine.generate(input_ids=wave, sampling_params=sampling)
            answers += [output["output_ids"] for output in outputs]
            verified += [output["meta_info"].get("spec_verify_ct", 0) for output in outputs]
            cached.append(sum(output["meta_info"]["cached_tokens"] for output in outputs))
        after = engine.get_server_info()["internal_states"][0]["probe"]
        counts = {name: after[name] - before.get(name, 0) for name in after if name != "threads"}
        return {
            "answers": answers,
            "cached_tokens": cached,
            "counts": counts,
            "threads": after["threads"],
            "verified": verified,
        }
    finally:
        engine.shutdown()


def prepare(case: dict[str, Any]) -> None:
    """Names of tiny models become folders, texts become token ids."""
    if case["model"] in tiny.MODELS:
        case["model"] = str(tiny.build(case["model"], MODELS))
    draft = case.get("engine", {}).get("speculative_draft_model_path")
    if draft in tiny.MODELS:
        case["engine"]["speculative_draft_model_path"] = str(tiny.build(draft, MODELS))
    tokenize(case)


def main() -> None:
    """Run the cases named on the command line."""
    source, target = map(Path, sys.argv[1:])
    results = []
    references: dict[str, list[Any]] = {}
    for case in json.loads(source.read_text()):
        prepare(case)
        result = run_engine(case)
        # Cases may differ in how they are served alone.
        asked = json.dumps([case["model"], case["prompts"], case["max_tokens"], case.get("attention")])
        if asked not in references:
            references[asked] = replaced_answers(case) if case.get("attention") else run_reference(case)
        result["reference"] = references[asked]
        results.append(result)
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
