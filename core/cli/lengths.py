"""The lengths of a step: given, drawn from a distribution, or read from a trace of requests."""

from __future__ import annotations

import contextlib
import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from attnloom.core.errors import shown

PREFIX_TOKENS = 512
"""Tokens of a block that Mooncake's traces name by a hash id."""


@dataclass(frozen=True)
class Lengths:
    """Requests of one step.

    Attributes:
        q: query tokens of each request.
        kv: KV tokens of each request, its queries' own included.
        source: where they come from, in words.
        prefixes: of each request the ids of its first blocks of 512 tokens: the same id is the same content and the
            same content before it. Empty where nothing is known of shared prefixes.
    """

    q: tuple[int, ...]
    kv: tuple[int, ...]
    source: str
    prefixes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("q", self.q), ("kv", self.kv)):
            for value in values:
                if not 0 <= value < 2**30:
                    raise ValueError(f"{name}={value}: expected 0 to 2**30 - 1 tokens")
        if not self.kv:
            raise ValueError("no requests: expected at least one")


def given(kv: Sequence[int], q: Sequence[int]) -> Lengths:
    """The lengths themselves; one length of queries is that of all requests.

    Raises:
        ValueError: there are as many neither as one nor as KV lengths.
    """
    if len(q) not in (1, len(kv)):
        raise ValueError(f"--q has {len(q)} lengths: expected 1 or {len(kv)}, as --kv has")
    return Lengths(tuple(q) * len(kv) if len(q) == 1 else tuple(q), tuple(kv), "given")


def uniform(batch: int, mean: int, seed: int, q: int) -> Lengths:
    """KV lengths equally likely from 1 to 2 * mean - 1."""
    draw = random.Random(seed)
    kv = [max(q, draw.randint(1, 2 * mean - 1)) for _ in range(batch)]
    return Lengths((q,) * batch, tuple(kv), f"uniform, mean {mean}, seed {seed}")


def zipf(batch: int, mean: int, seed: int, q: int) -> Lengths:
    """KV lengths by Zipf's law, proportional to 1 / rank with the given mean, in random order."""
    total = sum(1 / rank for rank in range(1, batch + 1))
    kv = [max(q, 1, round(mean * batch / total / rank)) for rank in range(1, batch + 1)]
    random.Random(seed).shuffle(kv)
    return Lengths((q,) * batch, tuple(kv), f"Zipf, mean {mean}, seed {seed}")


def prefill_first(lengths: Lengths, requests: int) -> Lengths:
    """The same with the first requests in prefill: all their KV tokens are queries."""
    q = (*lengths.kv[:requests], *lengths.q[requests:])
    return Lengths(
        q, lengths.kv, f"{lengths.source}; {requests} in prefill" if requests else lengths.source, lengths.prefixes
    )


def trace(file: Path, batch: int, skip: int, seed: int, prefill: int) -> Lengths:
    """A step over consecutive requests of a trace.

    The first ``prefill`` requests compute their whole prompt. The others decode, each at a random point of its answer:
    that many tokens are cached beside the prompt.

    Args:
        file: CSV with the columns ContextTokens and GeneratedTokens (AzurePublicDataset's), or JSON lines with
            input_length, output_length and, if known, hash_ids (Mooncake's).
        batch: requests of the step.
        skip: requests of the trace before the first one taken.
        seed: of the random points.
        prefill: requests that compute their prompt.

    Raises:
        ValueError: the file has another format, or too few requests; the message names the line.
        OSError: it cannot be read.
    """
    draw = random.Random(seed)
    q: list[int] = []
    kv: list[int] = []
    prefixes: list[tuple[int, ...]] = []
    # utf-8-sig: what Windows writes begins with a mark that is no part of the first name.
    with file.open(encoding="utf-8-sig", newline="") as text, _readable(file):
        for index, (prompt, answer, ids) in enumerate(_requests(file, text)):
            if index < skip:
                continue
            if len(kv) == batch:
                break
            in_prefill = len(kv) < prefill
            kv.append(prompt if in_prefill else prompt + draw.randint(1, max(answer, 1)))
            q.append(prompt if in_prefill else 1)
            prefixes.append(tuple(ids[: prompt // PREFIX_TOKENS]))
    if len(kv) < batch:
        raise ValueError(f"{file} has {skip + len(kv)} requests: expected at least {skip + batch} (--skip and --batch)")
    source = f"{file.name}, requests {skip} to {skip + batch - 1}, seed {seed}"
    return Lengths(
        tuple(q),
        tuple(kv),
        f"{source}; {prefill} in prefill" if prefill else source,
        tuple(prefixes) if any(prefixes) else (),
    )


_Request = tuple[int, int, list[int]]
"""Tokens of the prompt, tokens of the answer, hash ids."""


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}: expected a text file in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"{file}: {error}: expected CSV with ContextTokens and GeneratedTokens") from None


def _requests(file: Path, text: TextIO) -> Iterator[_Request]:
    first = text.read(1)
    while first.isspace():
        first = text.read(1)
    text.seek(0)
    return _json_lines(file, text) if first == "{" else _table(file, text)


def _tokens(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{shown(value)} is no number of tokens")
    return value


def _json_lines(file: Path, text: TextIO) -> Iterator[_Request]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = _tokens(row["input_length"]), _tokens(row["output_length"])
            names = [int(name) for name in row.get("hash_ids", ())]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{file}, line {number}: {error!r}: expected a JSON object with numbers input_length and output_length"
            ) from None
        yield prompt, answer, names


def _table(file: Path, text: TextIO) -> Iterator[_Request]:
    rows = csv.DictReader(text)
    for name in ("ContextTokens", "GeneratedTokens"):
        if name not in (rows.fieldnames or ()):
            raise ValueError(f"{file}, line 1: no column {name}: expected ContextTokens and GeneratedTokens")
    for row in rows:
        try:
            prompt, answer = _tokens(int(row["ContextTokens"])), _tokens(int(row["GeneratedTokens"]))
        except (ValueError, TypeError):
            raise ValueError(
                f"{file}, line {rows.line_num}: ContextTokens={shown(row['ContextTokens'])}, "
                f"GeneratedTokens={shown(row['GeneratedTokens'])}: expected numbers"
            ) from None
        yield prompt, answer, []
