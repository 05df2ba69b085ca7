"""Models on a GPU in one process: the same prompts through attnloom and vLLM's own backends.

    python -m integration_tests.vllm_gpu.case CASES.json RESULTS.json

A case: `name`, `model` (a name of models/tiny.py, or a folder), `prompts` (lists of token ids), `max_tokens`, `engine`
(arguments of vllm.LLM), `backends`. A result: the case's name, and for each backend what it answered and who ran, or
`error`, a traceback. Results are written after each case, and a line for each is printed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from integration_tests.models.folders import folder_of
from integration_tests.vllm_gpu.summary import summary


def run_backend(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """One engine: for each prompt the greedy tokens, and at each of them the five likeliest with their logprobs.

    Kernels are counted from when the engine begins to be made: a process may have run others, of models with other
    layers. Plans kept for graphs are the engine's own.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from attnloom.core.launch import run_count

    began, earlier = time.perf_counter(), run_count()
    settings = {
        "dtype": "float16",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.3,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "seed": 0,
        **case.get("engine", {}),
    }
    drafter = settings.get("speculative_config", {})
    if "model" in drafter:
        more = {"model": folder_of(drafter["model"]), "attention_backend": backend}
        settings["speculative_config"] = drafter | more
    llm = LLM(
        model=folder_of(case["model"]),
        attention_config={"backend": backend},
        worker_extension_cls="integration_tests.vllm_gpu.probe.Probe",
        **settings,
    )
    started = time.perf_counter() - began
    (before,) = llm.collective_rpc("probe_attention")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=case["max_tokens"], ignore_eos=True, logprobs=5, detokenize=False
    )
    inputs = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    answers = []
    for output in llm.generate(inputs, sampling, use_tqdm=False):
        done = output.outputs[0]
        steps = [{str(token): found.logprob for token, found in step.items()} for step in done.logprobs]
        answers.append({"tokens": list(done.token_ids), "logprobs": steps})
    (after,) = llm.collective_rpc("probe_attention")
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return {
        "answers": answers,
        "start_s": started,
        "runner": after["runner"],
        "impls": after["impls"],
        "layers": after["layers"],
        "runs_at_start": before["runs"] - earlier,
        "runs": after["runs"] - earlier,
    }


def main() -> None:
    """Run the cases named on the command line."""
    source, target = map(Path, sys.argv[1:])
    results: list[dict[str, Any]] = []
    target.write_text(json.dumps(results))  # of no case there is none
    for case in json.loads(source.read_text()):
        result: dict[str, Any] = {"name": case["name"]}
        for backend in case["backends"]:
            try:
                result[backend] = run_backend(case, backend)
            except Exception:
                result[backend] = {"error": traceback.format_exc()}
                print(f"== {case['name']} {backend}", *traceback.format_exc().splitlines()[:60], sep="\n", flush=True)
        results.append(result)
        target.write_text(json.dumps(results))
        print(summary(result), flush=True)


if __name__ == "__main__":
    main()
