"""Names that reach a path or a command line are checked."""

from __future__ import annotations

import pytest

from attnloom.core.jit import ModuleSpec, Source

BAD_NAMES = ["", "a b", "a/b", "../a", "1a", "a-b", "a;rm", "$a", "a\n", "é", "a" * 129, "a.b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_module_name_is_an_identifier(name: str) -> None:
    with pytest.raises(ValueError, match=r"ModuleSpec\.name=.*expected an identifier"):
        ModuleSpec(name, (Source("a.cpp", ""),))


@pytest.mark.parametrize("name", [*(f"{bad}.cpp" for bad in BAD_NAMES), "a", "a.py", "a.cpp\n", ".cpp", "a.cpp.sh"])
def test_a_source_name_is_an_identifier_with_a_known_ending(name: str) -> None:
    with pytest.raises(ValueError, match=r"Source\.name=.*expected an identifier"):
        Source(name, "")


def test_good_names_pass() -> None:
    made = ModuleSpec("_cpu_f32_d64", (Source("A_1.cpp", ""), Source("b.hpp", "")))
    assert [source.compiled for source in made.sources] == [True, False]


@pytest.mark.parametrize("names", [("a.cpp", "a.cpp"), ("a.cpp", "a.cu"), ("a.cpp", "b.h", "b.h")])
def test_sources_are_distinct(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected distinct file names"):
        ModuleSpec("m", tuple(Source(name, "") for name in names))


@pytest.mark.parametrize("names", [(), ("a.h",)])
def test_something_is_compiled(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        ModuleSpec("m", tuple(Source(name, "") for name in names))


def test_a_target_is_validated() -> None:
    with pytest.raises(ValueError, match=r"ModuleSpec.target='90a; rm'"):
        ModuleSpec("x", (Source("x.cu", ""),), "sm80", "90a; rm")
