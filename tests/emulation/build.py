"""Compiles a kernel of the sm80 family for the CPU: csrc's own headers, with the stand-ins of include/ before them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from attnloom.core.jit.spec import ModuleSpec
from attnloom.core.jit.template import CSRC, Rendering
from attnloom.core.jit.toolchain import toolchain

HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-march=native",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",  # which takes a jump to another stack for an error
    "-fno-strict-aliasing",  # registers are read as pairs of elements
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)


def compile_kernel(spec: ModuleSpec, folder: Path, csrc: Path = CSRC) -> Path:
    """The library of a kernel, made in ``folder``; raises as :func:`compile_text`."""
    text = spec.sources[0].text
    return compile_text(spec.name, text.text() if isinstance(text, Rendering) else text, folder, csrc)


def compile_text(name: str, text: str, folder: Path, csrc: Path = CSRC) -> Path:
    """The library of a translation unit.

    Raises:
        AssertionError: the compiler refuses it; the message is the compiler's.
    """
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    include = ["-I", str(HERE / "include"), "-I", str(csrc)]
    command = [*toolchain("cpu").command, *_FLAGS, *include, str(source), str(HERE / "fibres.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{name}: it does not compile with the stand-ins\n{done.stderr[:4000]}"
    return library
