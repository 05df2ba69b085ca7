"""SGLang's serving benchmark runs to its end against a server with attnloom: no request fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.demo.sglang_server import SglangServer
from integration_tests.running import MODELS
from integration_tests.sglang_cpu.running import environment

DATASETS = {
    "random-ids": (24, ["--random-input-len", "96", "--random-output-len", "12", "--num-prompts", "24"]),
    "generated-shared-prefix": (
        12,
        [
            *("--gsp-num-groups", "3", "--gsp-prompts-per-group", "4"),
            *("--gsp-system-prompt-len", "128", "--gsp-question-len", "32", "--gsp-output-len", "12"),
        ],
    ),
}


class CachingServer(SglangServer):
    """With the radix cache, pages of 16, and steps of at most 128 tokens that mix prefill and decode."""

    more = ("--page-size", "16", "--chunked-prefill-size", "128", "--enable-mixed-chunk")


def build_model() -> Path:
    """The tiny Qwen 2, made by a process that finds the workarounds: transformers imports torchvision."""
    program = "import sys; from pathlib import Path; from integration_tests.models import tiny; "
    program += "print(tiny.build('group7', Path(sys.argv[1])))"
    command = [sys.executable, "-c", program, str(MODELS)]
    done = subprocess.run(command, check=True, env=environment(), timeout=300, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[-1])


def bench(server: SglangServer, model: Path, dataset: str, arguments: list[str], folder: Path) -> dict[str, object]:
    """One run of `sglang.bench_serving`; what it wrote."""
    output = folder / f"{dataset}.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--base-url", server.url, "--model", "model", "--tokenizer", str(model)),
        *("--dataset-name", dataset, "--request-rate", "inf", "--disable-tqdm"),
        *("--output-file", str(output)),
        *arguments,
    ]
    done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, object] = json.loads(output.read_text().splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangServer, Path]]:
    model = build_model()
    with CachingServer("attnloom", model, "", tmp_path_factory.mktemp("server") / "log.txt") as server:
        server.wait()
        yield server, model


@pytest.mark.parametrize("dataset", DATASETS)
def test_no_request_fails(served: tuple[SglangServer, Path], dataset: str, tmp_path: Path) -> None:
    server, model = served
    requests, arguments = DATASETS[dataset]
    before = server.counts()
    result = bench(server, model, dataset, arguments, tmp_path)
    assert result["completed"] == requests
    counts = server.counts().since(before)
    assert counts.ran == "attnloom", counts
    assert counts.steps > 0
