"""A serving framework's server: started, waited for, asked, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
from openai import OpenAI

from integration_tests.running import ROOT


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Counts:
    """What the process with the model counted.

    Attributes:
        steps: forward passes of the model.
        expected: runs of attention that these passes ask for, all layers together.
        runs: of attention, by the name of the backend that ran.
        threads: of torch.
    """

    steps: int
    expected: int
    runs: dict[str, int]
    threads: int

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        runs = {name: count - before.runs[name] for name, count in self.runs.items()}
        return Counts(self.steps - before.steps, self.expected - before.expected, runs, self.threads)

    @property
    def ran(self) -> str | None:
        """The backend that every layer ran on in every step; None if that is not one."""
        ran = [name for name, count in self.runs.items() if count]
        return ran[0] if len(ran) == 1 and self.runs[ran[0]] == self.expected else None


class Server(ABC):
    """A server on this machine with one attention backend.

    Args:
        backend: its name, as the server's `--attention-backend` takes it.
        model: the model's folder.
        cpus: the cores that the model's OpenMP threads are bound to.
        log: the file that gets everything the server prints.
    """

    def __init__(self, backend: str, model: Path, cpus: str, log: Path) -> None:
        self.backend = backend
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        self.command = self.make_command(model)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            # A session of its own, so that stopping reaches all of the server's processes.
            self.process = subprocess.Popen(
                self.command,
                env=self.environment(cpus),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def port(self) -> str:
        """Where it listens."""
        return self.url.rpartition(":")[2]

    @abstractmethod
    def make_command(self, model: Path) -> list[str]:
        """What is run."""

    @abstractmethod
    def environment(self, cpus: str) -> dict[str, str]:
        """Its environment variables."""

    @abstractmethod
    def begin_counting(self) -> None:
        """After it is healthy."""

    @abstractmethod
    def counts(self) -> Counts:
        """So far."""

    @abstractmethod
    def stream(self, prompt: str, max_tokens: int) -> AsyncIterator[list[int]]:
        """Answer a chat with one message, greedily, in exactly max_tokens tokens; ids as they arrive."""

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
        raise SystemExit(f"the server with {self.backend} did not become healthy; the end of {self.log}:\n{tail}")

    def show_answer(self, question: str) -> None:
        """Ask over the OpenAI API and print the answer as it arrives."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none")
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


def common_environment() -> dict[str, str]:
    """The environment of either framework."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
