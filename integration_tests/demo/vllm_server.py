"""`vllm serve`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from integration_tests.demo.server import Counts, Server, common_environment


class VllmServer(Server):
    """vLLM with CUSTOM (attnloom) or CPU_ATTN (its own); `cpus` in the notation of VLLM_CPU_OMP_THREADS_BIND."""

    def make_command(self, model: Path) -> list[str]:
        """`vllm serve`."""
        return [
            *(str(Path(sys.executable).parent / "vllm"), "serve", str(model)),
            *("--served-model-name", "model"),
            *("--attention-backend", self.backend),
            *("--dtype", "float32"),
            # Compiling the model takes a minute; the attention is the same without.
            "--enforce-eager",
            *("--max-model-len", "2048"),
            *("--max-num-seqs", "16"),
            *("--kv-cache-memory-bytes", str(256 << 20)),
            # The same prompts are asked several times, and every time is to be measured.
            "--no-enable-prefix-caching",
            *("--worker-extension-cls", "integration_tests.vllm_cpu.probe.Probe"),
            *("--host", "127.0.0.1", "--port", self.port),
        ]

    def environment(self, cpus: str) -> dict[str, str]:
        """Threads bound, and the way to the probe open."""
        return {
            **common_environment(),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            # Opens /collective_rpc, through which the counters in the worker are read.
            "VLLM_SERVER_DEV_MODE": "1",
        }

    def begin_counting(self) -> None:
        """And forbid vLLM's own attention where attnloom was asked for."""
        self._call_worker("probe_start", *(["CPU_ATTN"] if self.backend == "CUSTOM" else []))

    def counts(self) -> Counts:
        """From the probe in the server's one worker."""
        found = self._call_worker("probe_read")
        runs = {"CUSTOM": found["attnloom"], "CPU_ATTN": found["cpu_attn"]}
        return Counts(found["steps"], found["steps"] * found["layers"], runs, found["threads"])

    def _call_worker(self, method: str, *arguments: str) -> dict[str, int]:
        answer = httpx.post(
            f"{self.url}/collective_rpc", json={"method": method, "args": arguments}, timeout=60
        ).raise_for_status()
        counts: dict[str, int] = answer.json()["results"][0]
        return counts

    async def stream(self, prompt: str, max_tokens: int) -> AsyncIterator[list[int]]:
        """Over the OpenAI API."""
        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            chunks = await client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=max_tokens,
                stream=True,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            async for chunk in chunks:
                new = (getattr(chunk.choices[0], "token_ids", None) or []) if chunk.choices else []
                if new:
                    yield new
