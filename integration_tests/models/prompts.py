"""Prompts of random tokens."""

from __future__ import annotations

import random

from integration_tests.models import tiny


def random_prompts(*lengths: int, vocabulary: int = tiny.VOCABULARY) -> list[list[int]]:
    """Of the given lengths, the same every time; the first token is the tiny models' <bos>."""
    draw = random.Random(2024)
    return [[0, *(draw.randrange(3, vocabulary) for _ in range(length - 1))] for length in lengths]
