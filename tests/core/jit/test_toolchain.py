"""Finding compilers, and saying so when there is none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from attnloom.core.errors import CompilerNotFound, JitError
from attnloom.core.jit import toolchain as module
from attnloom.core.jit.toolchain import toolchain
from tests.core.jit.helpers import CountingCompiler


def test_cxx_comes_first_and_may_carry_words(compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain("cpu").command == (str(compiler.path),)
    plain = toolchain("cpu").identity
    monkeypatch.setenv("CXX", f"{compiler.path} -m64")
    assert toolchain("cpu").command == (str(compiler.path), "-m64")
    assert toolchain("cpu").identity != plain


def test_path_is_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CountingCompiler.find()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("clang++", "c++", "g++"):
        (tmp_path / name).symlink_to(real)
        module._search_host_compiler.cache_clear()
        assert toolchain("cpu").command == (str(tmp_path / name),)


def test_the_identity_is_the_compilers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CountingCompiler.find()
    link = tmp_path / "another-name"
    link.symlink_to(real)
    monkeypatch.setenv("CXX", real)
    identity = toolchain("cpu").identity
    assert any(character.isdigit() for character in identity)
    assert os.uname().machine in identity
    monkeypatch.setenv("CXX", str(link))
    assert toolchain("cpu").identity == identity


def test_no_compiler_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        CompilerNotFound, match=r"looked for \$CXX .* g\+\+, c\+\+, clang\+\+ in PATH=.*apt-get install"
    ):
        toolchain("cpu")


def test_a_named_compiler_that_is_not_there_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(CompilerNotFound, match=r"CXX='no-such-compiler -O1': 'no-such-compiler' is no program"):
        toolchain("cpu")


def test_a_program_that_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", shutil.which("false") or "/bin/false")
    with pytest.raises(CompilerNotFound, match="Is it a C\\+\\+ compiler"):
        toolchain("cpu")


def test_an_unknown_family() -> None:
    with pytest.raises(JitError, match="no toolchain builds family 'sm7'; known: cpu"):
        toolchain("sm7")


def test_modules_may_not_use_fast_math() -> None:
    # Masked rows are -inf and stale slots may be NaN: an optimiser that assumes neither would break both.
    flags = toolchain("cpu").recipe.compile_flags
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only"} & set(flags)
    assert "-march=native" not in flags
