"""A cache and a counting compiler of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.jit.helpers import CountingCompiler


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, used by this process."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(folder))
    monkeypatch.delenv("ATTNLOOM_JIT", raising=False)
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    """A compiler that counts, used by this process."""
    counting = CountingCompiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(counting.path))
    return counting
