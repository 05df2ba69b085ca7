"""Prompts, asked all at once, and what a client sees: every token's id and time of arrival."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from integration_tests.demo.server import Counts, Server

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a weaver and her loom.",
    "List five animals that live in the sea.",
    "How do I boil an egg?",
    "Translate into French: the book is on the table.",
    "Summarise this. A weaver kept two looms in her workshop. On the first she made plain cloth for the market, "
    "quickly and without thinking. On the second she worked at night, slowly, with threads of every colour that she "
    "had saved from the first. People who passed her window asked what the second cloth was for, and she said that she "
    "would know when it was finished. When she was old the cloth covered the floor of the whole house, and nobody had "
    "ever walked on it. A child came in one evening without taking off his shoes, and she laughed: now she knew.",
    "Write a Python function that returns the largest number in a list, and explain every line of it.",
)


@dataclass(frozen=True)
class Round:
    """All prompts once, asked at the same time.

    Attributes:
        tokens: the ids that each prompt got.
        seconds: from the first request to the last token.
        first_token: per prompt, seconds from the request to its first token.
        inter_token: per prompt, mean seconds from one of its tokens to the next.
    """

    tokens: list[list[int]]
    seconds: float
    first_token: list[float]
    inter_token: list[float]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def ask_all(server: Server, max_tokens: int) -> Round:
    """Every prompt at once; exactly max_tokens tokens for each."""
    return asyncio.run(_ask_all(server, max_tokens))


async def _ask_all(server: Server, max_tokens: int) -> Round:
    async def ask(prompt: str) -> tuple[list[int], float, float]:
        start = time.perf_counter()
        arrivals: list[float] = []
        ids: list[int] = []
        async for new in server.stream(prompt, max_tokens):
            ids += new
            arrivals.append(time.perf_counter())
        return ids, arrivals[0] - start, (arrivals[-1] - arrivals[0]) / max(len(ids) - 1, 1)

    begin = time.perf_counter()
    answers = await asyncio.gather(*map(ask, PROMPTS))
    seconds = time.perf_counter() - begin
    tokens, first, between = (list(column) for column in zip(*answers, strict=True))
    return Round(tokens, seconds, first, between)


@dataclass(frozen=True)
class Measured:
    """Several rounds of one server, and what the process with the model counted meanwhile."""

    rounds: list[Round]
    counts: Counts

    @property
    def tokens_per_second(self) -> float:
        """Median of the rounds."""
        return statistics.median(each.tokens_per_second for each in self.rounds)

    @property
    def first_token_ms(self) -> float:
        """Median over rounds and prompts."""
        return 1e3 * statistics.median(seconds for each in self.rounds for seconds in each.first_token)

    @property
    def inter_token_ms(self) -> float:
        """Median over rounds and prompts."""
        return 1e3 * statistics.median(seconds for each in self.rounds for seconds in each.inter_token)
