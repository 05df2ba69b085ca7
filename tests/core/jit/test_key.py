"""What is in the cache key and what is not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from attnloom.core.jit import ModuleSpec, Source, key
from attnloom.core.jit.key import content_hash, headers, module_key
from attnloom.core.jit.toolchain import Recipe, Toolchain
from tests.core.jit.helpers import including, spec

RECIPE = Recipe("x86-64", ("-O3",), ("-shared",))
TOOLS = Toolchain(("/usr/bin/g++",), "gcc 12 x86_64-linux-gnu", RECIPE)


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc/ of a few headers: a.h -> deep/b.h -> c.h beside it, and the two includes of a cycle."""
    folder = tmp_path / "csrc"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.h").write_text('#pragma once\n#include <vector>\n  #  include "deep/b.h"\n')
    (folder / "deep" / "b.h").write_text('#include "c.h"\n#include "../cycle.h"\n')
    (folder / "deep" / "c.h").write_text("int c;\n")
    (folder / "cycle.h").write_text("#include <deep/b.h>\n")
    (folder / "unused.h").write_text("int unused;\n")
    (tmp_path / "outside.h").write_text("int outside;\n")
    monkeypatch.setattr(key, "CSRC", folder)
    return folder


def content(module: ModuleSpec, recipe: Recipe = RECIPE) -> str:
    return content_hash(module, headers(module), recipe)


def test_headers_are_followed(csrc: Path) -> None:
    assert set(headers(including("m", '"a.h"'))) == {"a.h", "deep/b.h", "deep/c.h", "cycle.h"}
    assert set(headers(including("m", "<deep/c.h>"))) == {"deep/c.h"}


def test_headers_of_the_compiler_and_outside_of_csrc_are_not(csrc: Path) -> None:
    assert headers(including("m", "<cstdint>")) == {}
    assert headers(including("m", '"omp.h"')) == {}
    assert headers(including("m", '"../outside.h"')) == {}


def test_a_header_of_the_module_itself_hides_one_of_csrc(csrc: Path) -> None:
    module = ModuleSpec("m", (Source("m.cpp", '#include "a.h"\n'), Source("a.h", '#include "deep/c.h"\n')))
    assert set(headers(module)) == {"deep/c.h"}


def test_an_include_through_a_macro_is_refused(csrc: Path) -> None:
    with pytest.raises(ValueError, match=r"probe\.cpp: #include HEADER: expected"):
        headers(including("m", "HEADER"))


def test_a_reached_header_is_in_the_key(csrc: Path) -> None:
    module = including("m", '"a.h"')
    before = content(module)
    (csrc / "deep" / "c.h").write_text("int c = 1;\n")
    assert content(module) != before


def test_other_files_times_and_places_are_not(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = including("m", '"a.h"')
    before = content(module)
    (csrc / "unused.h").write_text("int changed;\n")
    os.utime(csrc / "a.h", (1, 1))
    assert content(module) == before
    moved = csrc.rename(csrc.with_name("moved"))
    monkeypatch.setattr(key, "CSRC", moved)
    assert content(module) == before


def test_everything_that_decides_the_result_is_in_the_key() -> None:
    variants = [
        (spec(), TOOLS),
        (spec(value=43), TOOLS),
        (ModuleSpec("probe", (Source("other.cpp", spec().sources[0].text),)), TOOLS),
        (replace(spec(), sources=(*spec().sources, Source("x.h", ""))), TOOLS),
        (replace(spec(), family="sm80"), TOOLS),
        (spec(), replace(TOOLS, identity="gcc 13 x86_64-linux-gnu")),
        (spec(), replace(TOOLS, recipe=replace(RECIPE, arch="x86-64-v3"))),
        (spec(), replace(TOOLS, recipe=replace(RECIPE, compile_flags=("-O2",)))),
        (spec(), replace(TOOLS, recipe=replace(RECIPE, compile_flags=("-O3", "-shared"), link_flags=()))),
    ]
    keys = [module_key(content(module, tools.recipe), tools) for module, tools in variants]
    assert len(set(keys)) == len(keys)


def test_where_the_compiler_lies_is_not_in_the_key() -> None:
    assert module_key("c", TOOLS) == module_key("c", replace(TOOLS, command=("/opt/bin/g++",)))
