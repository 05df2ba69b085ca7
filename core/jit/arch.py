"""The processor this machine has, as compiler flags.

An explicit name instead of ``-march=native``: the same name on two machines means the same code, so a cache can move
between them, and a machine that lacks an instruction looks for another key instead of dying on the first use of it.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

# The x86-64 psABI levels in the spelling of /proc/cpuinfo (abm is LZCNT, lahf_lm is LAHF, cx16 is CMPXCHG16B).
_V2 = frozenset(["cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


@dataclass(frozen=True)
class Arch:
    """An architecture the compiler can be told to build for.

    Attributes:
        name: readable and exact, part of the cache key, e.g. ``x86-64-v4+avx512bf16``.
        flags: what says so to gcc and clang.
    """

    name: str
    flags: tuple[str, ...]


def arch_of(machine: str, cpuinfo: str) -> Arch:
    """The architecture that /proc/cpuinfo describes.

    Args:
        machine: as ``platform.machine()`` says it, e.g. ``x86_64``.
        cpuinfo: text of /proc/cpuinfo; empty where there is none, which gives the machine's baseline.
    """
    if machine in ("x86_64", "AMD64"):
        features = frozenset(_line(cpuinfo, "flags").split())
        if features >= _V4:
            wide = ("-march=x86-64-v4", "-mprefer-vector-width=512")
            if "avx512_bf16" in features:
                return Arch("x86-64-v4+avx512bf16", (*wide, "-mavx512bf16"))
            return Arch("x86-64-v4", wide)
        for name, level in (("x86-64-v3", _V3), ("x86-64-v2", _V2)):
            if features >= level:
                return Arch(name, (f"-march={name}",))
        return Arch("x86-64", ("-march=x86-64",))
    if machine in ("aarch64", "arm64") and (features_line := _line(cpuinfo, "Features")):
        # No levels there: let the compiler look, and tell machines apart by what they list.
        identity = "\n".join(_line(cpuinfo, key) for key in ("CPU implementer", "CPU part")) + features_line
        return Arch(f"aarch64-{hashlib.sha256(identity.encode()).hexdigest()[:12]}", ("-mcpu=native",))
    return Arch(machine, ())


@functools.cache
def host_arch() -> Arch:
    """The architecture of this machine; read once, a processor does not change under a process."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    return arch_of(platform.machine(), cpuinfo)


def _line(cpuinfo: str, key: str) -> str:
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return ""
