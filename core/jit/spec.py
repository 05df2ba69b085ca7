"""What is to be built: source texts under names that are safe in a path and on a command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnloom.core.jit.template import Rendering

_MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_TARGET = re.compile(r"[0-9]{2,3}[af]?")
_SOURCE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\.(cpp|cu|h|hpp|cuh)")


@dataclass(frozen=True)
class Source:
    """One file of a module: a file of csrc/ as it lies, or a template with its context.

    Attributes:
        name: file name in the build folder, e.g. ``attention.cpp``. ``.cpp`` and ``.cu`` are compiled, headers are not.
        text: its content; a :class:`Rendering` is rendered only when the module is built.
    """

    name: str
    text: str | Rendering

    def __post_init__(self) -> None:
        if not _SOURCE_NAME.fullmatch(self.name):
            raise ValueError(
                f"Source.name={self.name!r}: expected an identifier of at most 128 characters "
                "with one of the endings .cpp .cu .h .hpp .cuh"
            )

    @property
    def compiled(self) -> bool:
        """Whether this file is a translation unit."""
        return self.name.endswith((".cpp", ".cu"))


@dataclass(frozen=True)
class ModuleSpec:
    """One shared library to be built.

    Attributes:
        name: identifier, e.g. ``cpu_attention_f32_d64_causal``; prefix of the module's folder in the cache.
        sources: its files; at least one is compiled, names are distinct.
        family: toolchain that builds it, ``cpu`` is the C++17 host compiler, ``sm80`` nvcc, ``sm80_alike`` nvcc that
            contracts nothing.
        target: of nvcc, the architecture it compiles for, e.g. ``90a``; empty for the host.
    """

    name: str
    sources: tuple[Source, ...]
    family: str = "cpu"
    target: str = ""

    def __post_init__(self) -> None:
        if self.target and not _TARGET.fullmatch(self.target):
            raise ValueError(f"ModuleSpec.target={self.target!r}: expected an architecture of nvcc, e.g. 80 or 90a")
        if not _MODULE_NAME.fullmatch(self.name):
            raise ValueError(f"ModuleSpec.name={self.name!r}: expected an identifier of at most 128 characters")
        if not any(source.compiled for source in self.sources):
            raise ValueError(f"ModuleSpec.sources of {self.name}: expected at least one .cpp or .cu file")
        # Compared without endings, because a.cpp and a.cu would share the object file a.o.
        stems = [source.name.partition(".")[0] for source in self.sources if source.compiled]
        names = [source.name for source in self.sources]
        if len(set(stems)) != len(stems) or len(set(names)) != len(names):
            raise ValueError(f"ModuleSpec.sources of {self.name}: expected distinct file names, got {names}")
