"""Settings: defaults, what they accept, and what they say of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnloom.core.settings import Settings, settings


def test_defaults() -> None:
    assert settings({"HOME": "/ignored"}) == Settings(cache_dir=Path.home() / ".cache" / "attnloom")
    assert settings(dict.fromkeys(VARIABLES, "")) == settings({})


VARIABLES = [f"ATTNLOOM_{name}" for name in ("CACHE_DIR", "JIT", "VALIDATE", "FAMILY", "COMPOSE", "WORKERS")]


def test_everything_set() -> None:
    made = settings(dict(zip(VARIABLES, ["/tmp/c", "off", "1", "sm80", "OFF", "132"], strict=True)))
    assert made == Settings(Path("/tmp/c"), jit=False, validate=True, family="sm80", compose=False, workers=132)
    assert settings({"ATTNLOOM_CACHE_DIR": "~/x"}).cache_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ATTNLOOM_CACHE_DIR", "cache", "an absolute path"),
        ("ATTNLOOM_JIT", "yes", "on or off"),
        ("ATTNLOOM_VALIDATE", "2", "on or off"),
        ("ATTNLOOM_COMPOSE", " on", "on or off"),
        ("ATTNLOOM_FAMILY", "sm70", "one of cpu, sm80, sm90, sm100"),
        ("ATTNLOOM_WORKERS", "0", "an integer of at least 1"),
        ("ATTNLOOM_WORKERS", "-1", "an integer of at least 1"),
        ("ATTNLOOM_WORKERS", "99999999999", "an integer of at least 1 and at most 1048576"),
        ("ATTNLOOM_WORKERS", "9" * 50, "an integer of at least 1 and at most 1048576"),
        ("ATTNLOOM_WORKERS", "1.5", "an integer of at least 1"),
        ("ATTNLOOM_WORKERS", "²", "an integer of at least 1"),
    ],
)
def test_bad_values_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        settings()
    assert str(caught.value).startswith(f"{name}={value!r}: expected {expected}")


def test_the_environment_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_WORKERS", "3")
    assert settings().workers == 3
    monkeypatch.setenv("ATTNLOOM_WORKERS", "4")
    assert settings().workers == 4
