"""`sglang.launch_server`."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from integration_tests.demo.server import Counts, Server
from integration_tests.sglang_cpu.running import environment


class SglangServer(Server):
    """SGLang with attnloom or torch_native; `cpus` are not bound: SGLang does so with its own kernels only."""

    # The same prompts are asked several times, and every time is to be measured.
    more: tuple[str, ...] = ("--context-length", "2048", "--disable-radix-cache")

    def make_command(self, model: Path) -> list[str]:
        """`python -m sglang.launch_server`."""
        self.model = model
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--served-model-name", "model"),
            *("--attention-backend", self.backend),
            *("--dtype", "float32"),
            *("--device", "cpu"),
            *("--max-running-requests", "16"),
            *("--max-total-tokens", "8192"),
            # Two servers share the machine, and one of them waits.
            "--sleep-on-idle",
            *self.more,
            *("--host", "127.0.0.1", "--port", self.port),
        ]

    def environment(self, cpus: str) -> dict[str, str]:
        """As in the tests."""
        return environment()

    def begin_counting(self) -> None:
        """The probe has counted from the start."""

    def counts(self) -> Counts:
        """From the probe in the server's scheduler."""
        answer = httpx.get(f"{self.url}/server_info", timeout=60).raise_for_status()
        found: dict[str, int] = answer.json()["internal_states"][0]["probe"]
        runs = {"attnloom": found["attnloom"], "torch_native": found.get("torch_native", 0)}
        return Counts(found.get("steps", 0), found.get("layer_runs", 0), runs, found["threads"])

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    async def stream(self, prompt: str, max_tokens: int) -> AsyncIterator[list[int]]:
        """Over SGLang's own API, since its chats stream no ids of tokens."""
        chat = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        body = {
            "text": text,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            "stream": True,
        }
        seen = 0
        async with (
            httpx.AsyncClient(timeout=600) as client,
            client.stream("POST", f"{self.url}/generate", json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                ids: list[int] = json.loads(line.removeprefix("data: "))["output_ids"]  # all so far
                if len(ids) > seen:
                    yield ids[seen:]
                    seen = len(ids)
