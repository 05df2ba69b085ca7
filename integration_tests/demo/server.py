"""One `vllm serve`: started, waited for, asked over the OpenAI API, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """`vllm serve MODEL --attention-backend BACKEND` on this machine.

    Args:
        backend: CUSTOM (attnloom) or CPU_ATTN (vLLM's own).
        model: the model's folder.
        cpus: the cores that the worker's OpenMP threads are bound to, in vLLM's notation.
        log: the file that gets everything the server prints.
    """

    def __init__(self, backend: str, model: Path, cpus: str, log: Path) -> None:
        self.backend = backend
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        self.command = [
            *(str(Path(sys.executable).parent / "vllm"), "serve", str(model)),
            *("--served-model-name", "model"),
            *("--attention-backend", backend),
            *("--dtype", "float32"),
            # Compiling the model takes a minute; the attention is the same without.
            "--enforce-eager",
            *("--max-model-len", "2048"),
            *("--max-num-seqs", "16"),
            *("--kv-cache-memory-bytes", str(256 << 20)),
            # The same prompts are asked several times, and every time is to be measured.
            "--no-enable-prefix-caching",
            *("--worker-extension-cls", "integration_tests.vllm_cpu.probe.Probe"),
            *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            # Opens /collective_rpc, through which the counters in the worker are read.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            # A session of its own, so that stopping reaches the engine and the worker as well.
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, seconds: float = 300) -> None:
        """Return when the server is healthy; raise SystemExit with the end of its log if it will not be."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self.stop()
        tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-30:])
        raise SystemExit(f"vllm serve with {self.backend} did not become healthy; the end of {self.log}:\n{tail}")

    def call_worker(self, method: str, *arguments: str) -> dict[str, int]:
        """Call a method of the probe in the server's one worker."""
        answer = httpx.post(
            f"{self.url}/collective_rpc", json={"method": method, "args": arguments}, timeout=60
        ).raise_for_status()
        counts: dict[str, int] = answer.json()["results"][0]
        return counts

    def stop(self) -> None:
        """End the server and all its processes."""
        for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                return
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue

    def body(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """The body of a streaming, greedy chat request."""
        return {
            "model": "model",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            **more,
        }
