"""Models in one process: the same prompts through attnloom, vLLM's own CPU attention and transformers.

Reads a JSON list of cases and writes a JSON list of results:

    python -m integration_tests.vllm_cpu.case CASES.json RESULTS.json

A case: `model` (a folder), `prompts` (waves, one after the other, of texts or lists of token ids), `max_tokens`,
`engine` (arguments of vllm.LLM), `embed` (embeddings instead of tokens).
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from integration_tests.models.reference import run_reference, tokenize

BACKENDS = ("CUSTOM", "CPU_ATTN")


def run_backend(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """Every wave of prompts through one vLLM engine; what it answered and what its workers counted."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=case["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        attention_config={"backend": backend},
        worker_extension_cls="integration_tests.vllm_cpu.probe.Probe",
        **case.get("engine", {}),
    )
    before = llm.collective_rpc("probe_start", args=("CPU_ATTN" if backend == "CUSTOM" else "",))
    answers: list[Any] = []
    cached = 0
    for wave in case["prompts"]:
        inputs = [{"prompt_token_ids": ids} for ids in wave]
        if case.get("embed"):
            answers += [output.outputs.embedding for output in llm.embed(inputs, use_tqdm=False)]
            continue
        sampling = SamplingParams(temperature=0.0, max_tokens=case["max_tokens"], ignore_eos=True)
        for output in llm.generate(inputs, sampling, use_tqdm=False):
            answers.append(list(output.outputs[0].token_ids))
            cached += output.num_cached_tokens or 0
    after = llm.collective_rpc("probe_read")
    variants = llm.collective_rpc("probe_variants") if backend == "CUSTOM" else []
    workers = [{key: late[key] - early[key] for key in late} for early, late in zip(before, after, strict=True)]
    for worker, late in zip(workers, after, strict=True):
        worker["layers"] = late["layers"]
        worker["threads"] = late["threads"]
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return {"answers": answers, "workers": workers, "cached_tokens": cached, "variants": variants}


def main() -> None:
    """Run the cases named on the command line."""
    source, target = map(Path, sys.argv[1:])
    results = []
    for case in json.loads(source.read_text()):
        tokenize(case)
        result: dict[str, Any] = {backend: run_backend(case, backend) for backend in BACKENDS}
        result["reference"] = run_reference(case)
        results.append(result)
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
