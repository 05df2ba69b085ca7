"""Versions of attnloom, Python, and what attnloom needs."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys

from attnloom.core.cli.checks.section import Section
from attnloom.core.cli.version import location, version

_OLDEST_TORCH = (2, 11)
_NEEDED = ("jinja2", "ninja", "typer", "rich")


def check() -> Section:
    """Versions, and what is too old or missing."""
    section = Section("versions")
    section.facts["attnloom"] = f"{version()}, in {location()}"
    section.facts["python"] = f"{platform.python_version()}, {sys.executable}"
    section.facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        import torch
    except ImportError as error:
        section.facts["torch"] = None
        section.broken(
            f"torch cannot be imported: {error}", "pip install torch, in the version your framework asks for"
        )
    else:
        section.facts["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
        release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
        if release < _OLDEST_TORCH:
            oldest = ".".join(map(str, _OLDEST_TORCH))
            section.broken(f"torch {torch.__version__} is too old", f"pip install 'torch>={oldest}'")
    for name in _NEEDED:
        section.facts[name] = installed(name)
        if section.facts[name] is None:
            section.warning(f"{name} is not installed", f"pip install {name}")
    return section


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
