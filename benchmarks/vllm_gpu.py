"""vLLM serving a Llama-3.1-8B shape with random weights on a GPU: attnloom beside vLLM's own backends.

Each backend in a process of its own. What is asked: 64 prompts of U(512, 2048) random tokens, once for one token each
(prefill) and once for 64. A decode step is what the second takes longer, over 63. The model is not compiled, and decode
runs in CUDA graphs.

An engine's start is timed when every backend has started once, with two layers of the model: whoever comes first on a
machine pays for what all of them find in caches later. Those first starts are in the file, beside the row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.card import driver
from report import ROOT, Row, Target, arguments, publish

BACKENDS = ("CUSTOM", "TRITON_ATTN", "FLASH_ATTN")
PROMPTS, SHORTEST, LONGEST, ANSWER = 64, 512, 2048, 64
ROUNDS = 3
VOCABULARY = 128256


def prompts(seed: int) -> list[dict[str, list[int]]]:
    """Other tokens for every seed, the same lengths."""
    lengths = random.Random(0)
    draw = random.Random(seed)
    return [
        {"prompt_token_ids": draw.choices(range(1000, 100_000), k=lengths.randint(SHORTEST, LONGEST))}
        for _ in range(PROMPTS)
    ]


def start(backend: str, model: str, num_layers: int | None = None) -> tuple[Any, float]:
    """An engine and the seconds of its start; None: all layers of the model."""
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(
        model=model,
        load_format="dummy",
        hf_overrides={} if num_layers is None else {"num_hidden_layers": num_layers},
        dtype="bfloat16",
        skip_tokenizer_init=True,
        attention_config={"backend": backend},
        max_model_len=8192,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=False,
        max_num_seqs=PROMPTS,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64],
        },
        worker_extension_cls="integration_tests.vllm_gpu.probe.Probe",
    )
    return llm, time.perf_counter() - began


def measure(backend: str, model: str) -> dict[str, Any]:
    """One engine: seconds of its start, of prefill and of the whole, and the host's time for attention."""
    from vllm import SamplingParams

    llm, started = start(backend, model)

    def seconds(seed: int, tokens: int) -> float:
        asked = prompts(seed)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - began

    seconds(100, ANSWER)  # compiles what a backend compiles on first use
    prefill = [seconds(seed, 1) for seed in range(ROUNDS)]
    whole = [seconds(ROUNDS + seed, ANSWER) for seed in range(ROUNDS)]
    (who,) = llm.collective_rpc("probe_attention")
    llm.collective_rpc("probe_time_host")
    seconds(101, 8)
    (host,) = llm.collective_rpc("probe_host_us")
    return {"start_s": started, "prefill_s": prefill, "whole_s": whole, "host_us": host, "who": who}


def first_start(backend: str, model: str) -> dict[str, Any]:
    """Seconds of the start of a small engine, which builds the kernels of a whole one and fills the caches."""
    return {"start_s": start(backend, model, num_layers=2)[1]}


def in_a_process(work: str, backend: str, model: str, limit: float) -> dict[str, Any] | None:
    """What ``--first`` or ``--measure`` finds; None where it failed, and the end of what it said is printed then."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, __file__, f"--{work}", backend, "--json", str(result), "--model", model]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": path}
        with log.open("w") as stream:
            try:
                subprocess.run(
                    command, stdout=stream, stderr=subprocess.STDOUT, env=environment, timeout=limit, check=True
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                text = log.read_text()
                print(
                    f"{backend}, {work}: {type(error).__name__}",
                    text[text.find("Traceback") :][:6000],
                    text[-1500:],
                    sep="\n",
                )
                return None
        return json.loads(result.read_text())


def rows(found: dict[str, dict[str, Any]], first: dict[str, dict[str, Any]]) -> list[Row]:
    """The table, against TRITON_ATTN; ``first`` has the first starts in their order."""
    tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts(0))

    def of(name: str, unit: str, figures: dict[str, float], target: Target | None = None, **detail: Any) -> Row:
        ours = figures["CUSTOM"]
        peers = {backend: figure for backend, figure in figures.items() if backend != "CUSTOM"}
        ratio = ours / peers["TRITON_ATTN"] if "TRITON_ATTN" in peers else None
        return Row(name, ours, unit, peers, ratio, target, detail)

    prefill = {backend: statistics.median(result["prefill_s"]) for backend, result in found.items()}
    steps = {
        backend: 1e3 * (statistics.median(result["whole_s"]) - prefill[backend]) / (ANSWER - 1)
        for backend, result in found.items()
    }
    shape = f"{PROMPTS} prompts U({SHORTEST}, {LONGEST})"
    host = {backend: result["host_us"] for backend, result in found.items()}
    layer = {backend: taken.get("attention", 0.0) + taken.get("append", 0.0) for backend, taken in host.items()}
    return [
        of(
            f"decode step, {shape}",
            "ms",
            steps,
            Target("ratio", 1.0),
            seconds={b: r["whole_s"] for b, r in found.items()},
        ),
        of(
            f"prefill, {shape}",
            "tok/s",
            {backend: tokens / taken for backend, taken in prefill.items()},
            Target("ratio", 1.0, at_least=True),
            seconds={b: r["prefill_s"] for b, r in found.items()},
            tokens=tokens,
        ),
        of("host: metadata of a step", "us", {backend: taken["build"] for backend, taken in host.items()}),
        of("host: a layer's append and attention, without graphs", "us", layer),
        of(
            "engine start, caches filled",
            "s",
            {backend: result["start_s"] for backend, result in found.items()},
            first_of_two_layers_s={backend: result["start_s"] for backend, result in first.items()},
        ),
    ]


def each(work: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the backends find, one after the other; without those that fail."""
    found = {}
    for backend in options.backends:
        result = in_a_process(work, backend, options.model, options.limit)
        if result is not None:
            found[backend] = result
            print(work, backend, json.dumps(result), flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="/tmp/site/models/llama-3.1-8b", help="folder with the shape's config.json")
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for each process")
    parser.add_argument("--commit", help="what is measured, in a copy without its history")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--first", metavar="BACKEND", help="a small engine's start alone, in this process")
    alone.add_argument("--measure", metavar="BACKEND", help="this backend alone, in this process")
    options = parser.parse_args()
    if options.first:
        options.json.write_text(json.dumps(first_start(options.first, options.model)))
        return
    if options.measure:
        options.json.write_text(json.dumps(measure(options.measure, options.model)))
        return
    first = each("first", options)
    found = each("measure", options)
    if "CUSTOM" not in found:
        raise SystemExit("CUSTOM: no result")
    if found["CUSTOM"]["who"]["impls"] != ["AttnloomImpl"]:
        raise SystemExit(f"CUSTOM: expected attnloom's layers, found {found['CUSTOM']['who']}")
    import torch

    publish(
        "vllm_gpu",
        rows(found, first),
        options.json,
        peers=("vllm", "triton"),
        more={"card": torch.cuda.get_device_name(), "driver": driver()},
        measured=options.commit,
    )


if __name__ == "__main__":
    main()
