"""Finds the compiler of a kernel family and knows its command lines.

A family that needs another compiler adds a recipe and a finder here; nothing else in the JIT names a compiler.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from attnloom.core.errors import CompilerNotFound, JitError
from attnloom.core.jit.arch import host_arch
from attnloom.core.jit.nvcc import find_nvcc

ASK_SECONDS = 60.0
"""How long a compiler may take to say its version."""

_HOST_COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True)
class Recipe:
    """How a family is compiled, whatever the compiler: all that the flags say about the result.

    Attributes:
        arch: name of the architecture, part of the cache key.
        compile_flags: flags of a translation unit.
        link_flags: flags of the shared library.
    """

    arch: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @property
    def flags(self) -> str:
        """All flags, as text."""
        return shlex.join([*self.compile_flags, "link", *self.link_flags])


@dataclass(frozen=True)
class Toolchain:
    """A compiler that was found, with the recipe it follows.

    Attributes:
        command: the compiler, resolved, with the words that ``CXX`` may carry after it.
        identity: its version and target, without paths; part of the cache key.
        recipe: what it is asked to make.
    """

    command: tuple[str, ...]
    identity: str
    recipe: Recipe

    def compile_command(self, source: str, output: str, include: str) -> list[str]:
        """Command that compiles ``source`` into the object ``output``, with headers from the folder ``include``."""
        return [*self.command, *self.recipe.compile_flags, "-I", include, "-c", source, "-o", output]

    def link_command(self, objects: list[str], output: str) -> list[str]:
        """Command that links ``objects`` into the shared library ``output``."""
        return [*self.command, *self.recipe.link_flags, *objects, "-o", output]


def recipe(family: str, target: str = "") -> Recipe:
    """The recipe of a family, for one architecture where the family has several. Looks for no compiler.

    Raises:
        JitError: no toolchain builds this family.
    """
    return _family(family)[0](target)


def toolchain(family: str, target: str = "") -> Toolchain:
    """The toolchain of a family; one process asks a compiler for its version once.

    Raises:
        CompilerNotFound: no compiler where it was looked for.
        JitError: no toolchain builds this family.
    """
    make_recipe, find = _family(family)
    command = find()
    return Toolchain(command, _identity(command), make_recipe(target))


def _host_recipe(target: str) -> Recipe:
    arch = host_arch()
    # No -ffast-math: masks rely on infinities and NaN. errno and traps are what stands between a loop and SIMD.
    compile_flags = (
        "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=fast "
        "-Werror=return-type"  # a hook that returns nothing would run on into whatever lies behind it
    )
    return Recipe(arch.name, (*compile_flags.split(), *arch.flags), ("-shared", "-fopenmp"))


def _find_host_compiler() -> tuple[str, ...]:
    return _search_host_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath))


@functools.cache
def _search_host_compiler(cxx: str, path: str) -> tuple[str, ...]:
    if words := shlex.split(cxx):
        # Named, so meant: falling back to another compiler would build something the user did not ask for.
        found = shutil.which(words[0], path=path)
        if found is None:
            raise CompilerNotFound(
                f"CXX={cxx!r}: {words[0]!r} is no program in PATH. Set CXX to a C++17 compiler, or unset it."
            )
        return (found, *words[1:])
    for name in _HOST_COMPILERS:
        if (found := shutil.which(name, path=path)) is not None:
            return (found,)
    raise CompilerNotFound(
        f"no C++17 compiler: looked for $CXX (unset) and for {', '.join(_HOST_COMPILERS)} in PATH={path}. "
        "Install one (Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or set CXX, "
        "or fill ATTNLOOM_CACHE_DIR on a machine that has a compiler and the same processor family."
    )


@functools.cache
def _identity(command: tuple[str, ...]) -> str:
    if Path(command[0]).name == "nvcc":
        return _ask(command, "--version").strip().rpartition("\n")[2]
    version = _ask(command, "--version").partition("\n")[0].strip()
    # gcc begins the line with the name it was called by, which says nothing about the compiler.
    version = re.sub(r"^\S+ \(", "gcc (", version)
    return " ".join((version, _ask(command, "-dumpmachine").strip(), *command[1:]))


def _ask(command: tuple[str, ...], option: str) -> str:
    try:
        done = subprocess.run(
            [*command, option],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "LC_ALL": "C"},
            timeout=ASK_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise CompilerNotFound(f"{shlex.join([*command, option])} failed: {reason}. Is it a C++ compiler?") from error
    return done.stdout


def _cuda_recipe(target: str) -> Recipe:
    # Machine code of the one architecture and no PTX: what runs is what was compiled and tested.
    flags = (
        f"-std=c++17 -O3 -gencode=arch=compute_{target},code=sm_{target} "
        "-Xcompiler -fPIC,-fvisibility=hidden "
        "-diag-suppress 177 -diag-error 940"  # a variant's unused switches; a hook that returns nothing
    )
    return Recipe(f"sm_{target}", tuple(flags.split()), ("-shared",))


def _cuda_alike_recipe(target: str) -> Recipe:
    # Of the batch_invariant mode. Where a compiler may contract a product and a sum into one rounding, it decides by
    # what lies around them: two copies of the same hook, for two rows, could round differently.
    usual = _cuda_recipe(target)
    return replace(usual, compile_flags=(*usual.compile_flags, "-fmad=false"))


def _find_nvcc() -> tuple[str, ...]:
    return (str(find_nvcc().path),)


_Family = tuple[Callable[[str], Recipe], Callable[[], tuple[str, ...]]]
_FAMILIES: dict[str, _Family] = {
    "cpu": (_host_recipe, _find_host_compiler),
    "sm80": (_cuda_recipe, _find_nvcc),
    "sm80_alike": (_cuda_alike_recipe, _find_nvcc),
}


def _family(name: str) -> _Family:
    try:
        return _FAMILIES[name]
    except KeyError:
        raise JitError(f"no toolchain builds family {name!r}; known: {', '.join(_FAMILIES)}") from None
