"""The settings, and where each comes from."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields

from attnloom.core.cli.checks.section import Section
from attnloom.core.settings import Settings, settings

NAMES = tuple(f"ATTNLOOM_{field.name.upper()}" for field in fields(Settings))


def check() -> Section:
    """Every setting with its value; what cannot be read; what looks like a setting and is none."""
    section = Section("settings")
    for name, field in zip(NAMES, fields(Settings), strict=True):
        given = os.environ.get(name)
        try:
            value = getattr(settings({name: given} if given else {}), field.name)
        except ValueError as error:
            section.facts[name] = given
            section.broken(str(error), f"set {name} to what is expected, or unset it")
            continue
        section.facts[name] = f"{_word(value)} ({'environment' if given else 'default'})"
    for name in sorted(os.environ):
        if name.startswith("ATTNLOOM_") and name not in NAMES:
            like = difflib.get_close_matches(name, NAMES, n=1)
            section.warning(
                f"{name} is set and is no setting of attnloom",
                f"unset it; is {like[0]} meant?" if like else f"unset it; there are {', '.join(NAMES)}",
            )
    return section


def _word(value: object) -> str:
    if value is None:
        return "the device's own"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
