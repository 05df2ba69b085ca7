"""Templates are strict: what they need and do not get is an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pytest

from attnloom.core.jit import ModuleSpec, Rendering, Source, key, load, template
from attnloom.core.jit.key import content_hash, headers
from attnloom.core.jit.toolchain import Recipe
from tests.core.jit.helpers import CountingCompiler


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty csrc/."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    monkeypatch.setattr(template, "CSRC", folder)
    monkeypatch.setattr(key, "CSRC", folder)
    template._environment.cache_clear()
    yield folder
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


@dataclass(frozen=True)
class Parameter:
    name: str
    default: int


def module(**context: object) -> ModuleSpec:
    return ModuleSpec("rendered", (Source("a.cpp", Rendering.of("a.cpp.jinja", **context)),))


@pytest.fixture
def nested(csrc: Path) -> Path:
    """A template that includes another, which includes a header."""
    (csrc / "a.cpp.jinja").write_text(
        '{% include "b.jinja" %}\n'
        "{% for p in params %}\n"
        'extern "C" __attribute__((visibility("default"))) int {{ p.name }}() { return {{ p.default }} + base; }\n'
        "{% endfor %}\n"
    )
    (csrc / "b.jinja").write_text('#include "c.h"\n')
    (csrc / "c.h").write_text("constexpr int base = 40;\n")
    return csrc


def test_a_rendering_takes_dataclasses_and_is_a_value(nested: Path) -> None:
    parameters = (Parameter("first", 1), Parameter("second", 2))
    made = module(params=parameters, unused={"a": [1.5, None]})
    assert made == module(unused={"a": [1.5, None]}, params=list(parameters))
    assert hash(made) == hash(module(params=parameters, unused={"a": [1.5, None]}))
    assert "int first() { return 1 + base; }" in Rendering.of("a.cpp.jinja", params=parameters).text()
    with pytest.raises(TypeError, match=r"context holds .*object.*: expected numbers"):
        module(params=[object()])


def test_a_rendered_module_is_built_once_and_then_found_without_jinja(
    nested: Path, cache: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(module(params=[Parameter("two", 2)])).two() == 42
    monkeypatch.setitem(sys.modules, "jinja2", None)  # an import of it fails from here on
    template._environment.cache_clear()
    monkeypatch.setattr(sys.modules[load.__module__], "_loaded", {})
    assert load(module(params=[Parameter("two", 2)])).two() == 42
    assert compiler.count == 1
    with pytest.raises(ImportError):
        load(module(params=[Parameter("three", 3)]))


def test_all_that_a_rendering_is_made_of_is_in_the_key(nested: Path) -> None:
    def content(**context: object) -> str:
        spec = module(**context)
        assert set(headers(spec)) == {"c.h"}
        return content_hash(spec, headers(spec), Recipe("x86-64", (), ()))

    seen = [content(params=[]), content(params=[Parameter("a", 1)]), content(params=[Parameter("a", 2)])]
    assert content(params=[]) == seen[0]
    for name in ("a.cpp.jinja", "b.jinja", "c.h"):
        with (nested / name).open("a") as file:
            file.write("// edited\n")
        seen.append(content(params=[]))
    assert len(set(seen)) == 6


def test_a_template_named_by_an_expression_is_refused(csrc: Path) -> None:
    (csrc / "a.cpp.jinja").write_text("{% include which %}")
    with pytest.raises(ValueError, match=r"a\.cpp\.jinja: template which: expected a quoted path"):
        headers(module(which="b.jinja"))


def test_a_failed_rendering_leaves_nothing(csrc: Path, cache: Path) -> None:
    (csrc / "a.cpp.jinja").write_text("int x = {{ value }};\n")
    with pytest.raises(jinja2.UndefinedError, match="value"):
        load(module())
    assert list(cache.iterdir()) == []
