"""Lengths that are given, drawn, or read from a trace."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from attnloom.core.cli.lengths import PREFIX_TOKENS, given, prefill_first, trace, uniform, zipf
from tests.core.cli.helpers import DATA

AZURE = DATA / "azure_conv.csv"
MOONCAKE = DATA / "mooncake_conversation.jsonl"


def test_given_lengths() -> None:
    assert given([4096, 128], [1]).q == (1, 1)
    assert given([4096, 128], [3, 4]).q == (3, 4)
    with pytest.raises(ValueError, match=r"--q has 3 lengths: expected 1 or 2"):
        given([4096, 128], [1, 2, 3])
    with pytest.raises(ValueError, match="kv=-1: expected 0 to"):
        given([-1], [1])
    with pytest.raises(ValueError, match="no requests"):
        given([], [1])


@pytest.mark.parametrize("draw", [uniform, zipf])
def test_drawn_lengths_have_the_mean_and_the_seed(draw) -> None:  # type: ignore[no-untyped-def]
    first = draw(2000, 4096, 7, 1)
    assert first == draw(2000, 4096, 7, 1)
    assert first.kv != draw(2000, 4096, 8, 1).kv
    assert abs(statistics.mean(first.kv) / 4096 - 1) < 0.05
    assert min(first.kv) >= 1 and set(first.q) == {1}
    assert min(draw(2000, 4096, 7, 30).kv) >= 30, "a request holds its own queries"


def test_the_distributions_differ() -> None:
    assert max(uniform(500, 1000, 0, 1).kv) < 2000 < 50_000 < max(zipf(500, 1000, 0, 1).kv)
    longest = sorted(zipf(100, 1000, 0, 1).kv, reverse=True)
    assert abs(longest[0] / longest[1] - 2) < 0.01 and abs(longest[0] / longest[9] - 10) < 0.1


def test_the_first_requests_may_be_in_prefill() -> None:
    step = prefill_first(given([100, 200, 300], [1]), 2)
    assert (step.q, step.kv) == ((100, 200, 1), (100, 200, 300))
    assert step.source.endswith("2 in prefill")


def test_a_table() -> None:
    """Its first rows, as they stand in the file: 374 and 44, 396 and 109, 879 and 55."""
    step = trace(AZURE, 3, 0, 0, 1)
    assert (step.q, step.kv[0]) == ((374, 1, 1), 374)
    assert 397 <= step.kv[1] <= 396 + 109 and 880 <= step.kv[2] <= 879 + 55
    assert step == trace(AZURE, 3, 0, 0, 1)
    assert step.kv != trace(AZURE, 3, 0, 1, 1).kv
    assert trace(AZURE, 1, 2, 0, 1).kv == (879,)
    assert step.prefixes == ()
    assert len(trace(AZURE, 200, 0, 0, 0).kv) == 200


def test_json_lines_name_shared_prefixes() -> None:
    """The first two requests are of 6758 and 7322 tokens and begin with the same block, 0."""
    step = trace(MOONCAKE, 2, 0, 0, 2)
    assert step.kv == step.q == (6758, 7322)
    assert step.prefixes[0] == tuple(range(13)), "the last block is not whole: 6758 = 13 * 512 + 102"
    assert step.prefixes[1][0] == 0 and not set(step.prefixes[1][1:]) & set(step.prefixes[0])
    assert all(len(names) == tokens // PREFIX_TOKENS for names, tokens in zip(step.prefixes, step.kv, strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "line 1: no column GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n1,2\n3,many\n", "line 3: ContextTokens='3', GeneratedTokens='many'"),
        ("ContextTokens,GeneratedTokens\n1\n", "line 2: ContextTokens='1', GeneratedTokens=None"),
        ('{"input_length": 1, "output_length": 2}\n{"input_length": 1}\n', "line 2: .*expected a JSON object"),
        ('{"input_length": 1, "output_length": 2}\nnot json\n', "line 2: .*expected a JSON object"),
        ('{"input_length": 1, "output_length": 2}\n[1]\n', "line 2: .*expected a JSON object"),
        ("", "line 1: no column ContextTokens"),
        (
            "ContextTokens,GeneratedTokens\n-5,2\n1,1\n",
            "line 2: ContextTokens='-5', GeneratedTokens='2': expected numbers",
        ),
        ('ContextTokens,GeneratedTokens\n"' + "1" * 200_000 + '",5\n', "field larger than field limit"),
        ("ContextTokens,GeneratedTokens\n" + "1" * 9000 + ",5\n", r"line 2: ContextTokens='1{79}\.\.\., Gener"),
        ('{"input_length": Infinity, "output_length": 1}\n', "line 1: .*inf is no number of tokens"),
        ('{"input_length": 3.7, "output_length": 1}\n', "line 1: .*3.7 is no number of tokens"),
        ('{"input_length": 600, "output_length": 1, "hash_ids": [Infinity]}\n', "line 1: .*expected a JSON object"),
        ('{"input_length": 1, "x":' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 1: RecursionError"),
    ],
)
def test_other_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        trace(file, 2, 0, 0, 0)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"trace: 'utf-8' codec .*: expected a text file in UTF-8"):
        trace(file, 1, 0, 0, 0)


def test_marks_and_blank_lines_before_the_first(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\xef\xbb\xbfContextTokens,GeneratedTokens\r\n5,6\r\n")
    assert trace(file, 1, 0, 0, 1).kv == (5,)
    file.write_text('\n\n{"input_length": 5, "output_length": 1}\n')
    assert trace(file, 1, 0, 0, 1).kv == (5,)


def test_a_trace_that_is_too_short() -> None:
    with pytest.raises(ValueError, match=r"azure_conv\.csv has 200 requests: expected at least 201"):
        trace(AZURE, 51, 150, 0, 0)
