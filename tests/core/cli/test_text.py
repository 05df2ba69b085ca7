"""Numbers as people write them."""

from __future__ import annotations

import time

import pytest

from attnloom.core.cli.text import ago, count, parse_duration, parse_size, size


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 10, "200 KiB"), (5 << 30, "5 GiB"), (3 << 40, "3 TiB")],
)
def test_sizes(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


@pytest.mark.parametrize(
    ("text", "bytes_"), [("0", 0), ("10", 10), ("1k", 1024), ("1.5M", 3 << 19), ("2GiB", 2 << 30), (" 1 tb ", 1 << 40)]
)
def test_sizes_are_read(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "M", "-1", "1x", "1e3", "1 2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes"):
        parse_size(text)


def test_numbers_beyond_every_float() -> None:
    for parse, unit in ((parse_size, "G"), (parse_duration, "d")):
        with pytest.raises(ValueError, match=r"9{79}\.\.\.: expected a number of fewer digits"):
            parse("9" * 400 + unit)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1), ("2m", 120), ("1.5h", 5400), ("30d", 2592000), ("1w", 604800)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "30", "-1d", "1y"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number with s, m, h, d or w"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "just now"), (61, "1 minute ago"), (7300, "2 hours ago"), (3 * 86400 + 5, "3 days ago"), (-9, "just now")],
)
def test_ages(seconds: float, text: str) -> None:
    assert ago(time.time() - seconds) == text


def test_counts() -> None:
    assert (count(1, "module"), count(0, "module"), count(1200, "module")) == ("1 module", "0 modules", "1,200 modules")
