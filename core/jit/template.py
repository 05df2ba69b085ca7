"""Renders the Jinja2 templates that lie in csrc/."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

CSRC = Path(__file__).parents[2] / "csrc"
"""The C++ sources of the package: beside core/ in a checkout and in an installed wheel."""


def render(template: str, **context: object) -> str:
    """Render one template.

    Args:
        template: path under csrc/, e.g. ``cpu/attention.cpp.jinja``.
        **context: its variables. One that the template uses and the context lacks is an error, never an empty string.

    Raises:
        jinja2.TemplateNotFound: there is no such file.
        jinja2.UndefinedError: the context lacks a variable.
    """
    return _environment().get_template(template).render(**context)


@functools.cache
def _environment() -> jinja2.Environment:
    # Imported late: a process that finds its modules in memory never renders.
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(CSRC),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
