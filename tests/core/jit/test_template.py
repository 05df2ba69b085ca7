"""Templates are strict: what they need and do not get is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from attnloom.core.jit import template


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(template, "CSRC", tmp_path)
    template._environment.cache_clear()
    yield tmp_path
    template._environment.cache_clear()


def test_csrc_is_the_packages_own() -> None:
    assert (template.CSRC / "common" / "params.h").is_file()


def test_render(csrc: Path) -> None:
    (csrc / "a.cpp.jinja").write_text("{% if deep %}\nconst char* s = {{ text }};\n{% endif %}\nint x[2] = {1, 2};\n")
    assert template.render("a.cpp.jinja", deep=True, text='"<&>"') == 'const char* s = "<&>";\nint x[2] = {1, 2};\n'


def test_a_missing_variable_is_an_error(csrc: Path) -> None:
    (csrc / "a.cpp.jinja").write_text("int x = {{ value }};\n")
    with pytest.raises(jinja2.UndefinedError, match="value"):
        template.render("a.cpp.jinja")


@pytest.mark.parametrize("name", ["none.jinja", "../pyproject.toml"])
def test_only_files_of_csrc(csrc: Path, name: str) -> None:
    with pytest.raises(jinja2.TemplateNotFound):
        template.render(name)
