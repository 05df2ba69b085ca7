"""Variants by name: the catalogue's, entry points, objects in modules and files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnloom.core import variants
from attnloom.core.named import catalogue, offered, parse_variant
from attnloom.core.variant import Variant

USER = """
import torch
from attnloom import Param, Variant, score_mod

table = torch.arange(8.0)
calls = []

def damped(score, b, h, q_idx, kv_idx):
    return score * table[h]

traced = score_mod(damped)
class inner:
    shifted = Variant("shifted", (Param("by"),), logits_transform="return logits + params.by;")

def made(by=1.0):
    calls.append(by)
    return Variant("made", (Param("by"),), logits_transform="return logits + params.by;", captures={"by": by})

number = 3
def returns_a_number(): return 3
def fails(): raise RuntimeError("no luck")
def zaps(): raise KeyError("zap")
def leaves(): raise SystemExit(0)
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    file = tmp_path / "my_variants.py"
    file.write_text(USER)
    return file


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    """A distribution in ``folder`` that offers variants, as an installed package does."""
    info = folder / "their_variants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-variants\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in names.items()]
    (info / "entry_points.txt").write_text("\n".join(["[attnloom.variants]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder))


def test_the_catalogue_is_the_modules_own() -> None:
    found = catalogue()
    assert {"causal", "full", "sliding_window", "soft_cap", "alibi", "sinks", "packed_mask"} <= set(found)
    assert found["soft_cap"] is variants.SoftCap
    assert "check_positive" not in found and "variant" not in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("causal", variants.Causal()),
        (" soft_cap ", variants.SoftCap()),
        ("ALiBi", variants.ALiBi()),
        ("SlidingWindow(4096)", variants.SlidingWindow(4096)),
        ("sliding_window(window=8, symmetric=True)", variants.SlidingWindow(8, symmetric=True)),
        ("causal & soft_cap & sinks", variants.Causal() & variants.SoftCap() & variants.Sinks()),
    ],
)
def test_variants_are_read(text: str, expected: object) -> None:
    assert parse_variant(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected names joined by &"),
        ("no_such", "no 'no_such' in the catalogue, which has alibi, .*causal"),
        ("causal | full", "expected names joined by &"),
        ("sliding_window", r"expected sliding_window\(window: 'int'"),
        ("sliding_window(print())", r"argument 'print\(\)': expected a literal"),
        ("sliding_window(0)", "window=0"),
        ("variants.Causal()", "expected names joined by &"),
        ("__import__('os').system('true')", "expected names joined by &"),
        ("sinks & sinks", "both have a sink"),
        ("soft_cap([1])", r"variant 'soft_cap\(\[1\]\)': calling SoftCap: "),
        ("sliding_window('a')", "calling SlidingWindow: TypeError: window='a': expected an int"),
        ("soft_cap({[]: 1})", r"argument '{\[\]: 1}': expected a literal"),
        ("sliding_window(**{'window': 3})", "expected names joined by &"),
        ("causal & " * 3000 + "causal", "nested too deeply"),
    ],
)
def test_what_is_no_variant(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variant(text)


def test_objects_in_files_and_modules(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = parse_variant("my_variants.py:traced", user.parent)
    assert traced.name == "damped" and "table" in traced.captures
    assert parse_variant(f"{user}:traced") is traced, "a file is run once"
    assert parse_variant("my_variants.py:inner.shifted", user.parent).name == "shifted"
    assert parse_variant("my_variants.py:made", user.parent).captures == {"by": 1.0}
    monkeypatch.syspath_prepend(str(user.parent))
    assert parse_variant("my_variants:made").name == "made"
    del sys.modules["my_variants"]


def test_entry_points(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(user.parent, monkeypatch, shifted="my_variants:inner.shifted", made="my_variants:made", soft_cap="no:thing")
    assert set(offered()) >= {"shifted", "made", "soft_cap"}
    assert parse_variant("shifted").name == "shifted"
    assert parse_variant("causal & made(2.5)").captures == {"by": 2.5}
    assert parse_variant("soft_cap") == variants.SoftCap(), "the catalogue comes first"
    with pytest.raises(ValueError, match=r"among the entry points of attnloom.variants: .*shifted"):
        parse_variant("no_such")
    with pytest.raises(ValueError, match="takes none"):
        parse_variant("shifted(1)")
    del sys.modules["my_variants"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such.py:thing", r"importing no_such.py: FileNotFoundError: .*no_such.py"),
        ("no_such_module:thing", "importing no_such_module: ModuleNotFoundError"),
        ("my_variants.py:no_such", "my_variants.py has no 'no_such'"),
        ("my_variants.py:number", "expected a Variant or a function that returns one, got 3"),
        ("my_variants.py:returns_a_number", "expected a Variant or a function that returns one, got 3"),
        ("my_variants.py:damped", r"missing a required argument: 'score'"),
        ("my_variants.py", "expected names joined by &"),
        ("my_variants.py:fails", "calling fails: RuntimeError: no luck"),
        ("my_variants.py:zaps", "variant 'my_variants.py:zaps': calling zaps: KeyError: 'zap'"),
        ("my_variants.py:leaves", "calling leaves: SystemExit: 0"),
    ],
)
def test_what_is_no_object(user: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variant(text, user.parent)


def test_a_file_that_fails_is_run_again(user: Path) -> None:
    user.write_text("raise RuntimeError('not yet')")
    with pytest.raises(ValueError, match=r"importing my_variants\.py: RuntimeError: not yet"):
        parse_variant("my_variants.py:traced", user.parent)
    user.write_text(USER)
    assert isinstance(parse_variant("my_variants.py:traced", user.parent), Variant)


def test_what_leaves_the_program_is_an_error(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"importing my_variants\.py: SystemExit: 0"):
        parse_variant("my_variants.py:traced", user.parent)
    install(user.parent, monkeypatch, leaving="my_variants:traced")
    with pytest.raises(ValueError, match="variant 'leaving': importing my_variants:traced: SystemExit: 0"):
        parse_variant("leaving")
