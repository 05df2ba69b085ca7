"""The Jinja2 templates that lie in csrc/, rendered now or when they are needed."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

CSRC = Path(__file__).parents[2] / "csrc"
"""The C++ sources of the package: beside core/ in a checkout and in an installed wheel."""


_REFERENCE = re.compile(r"""\{%[-+]?\s*(?:include|extends|import|from)\s+(?:"([^"]+)"|'([^']+)'|(\w\S*))""")


@dataclasses.dataclass(frozen=True)
class Rendering:
    """A text that is rendered when it is compiled, and not before: a module in the cache is found without Jinja2.

    Attributes:
        template: path under csrc/, e.g. ``cpu/attention.cpp.jinja``.
        context: its variables, as JSON.
    """

    template: str
    context: str

    @classmethod
    def of(cls, template: str, **context: object) -> Rendering:
        """A rendering of ``template``; see :func:`render`.

        Args:
            template: path under csrc/.
            **context: numbers, texts, and lists, dicts and dataclasses of them; a dataclass becomes a dict, which a
                template reads by the same names.

        Raises:
            TypeError: the context holds something else.
        """
        return cls(template, json.dumps(context, sort_keys=True, default=_plain))

    def text(self) -> str:
        """The rendered text.

        Raises: as :func:`render`.
        """
        return render(self.template, **json.loads(self.context))

    def ingredients(self) -> dict[str, str]:
        """The template and every one that it includes, as {path under csrc/: text}; the context is all that is missing.

        Raises:
            FileNotFoundError: there is no such template.
            ValueError: a template names another by an expression, which cannot be followed.
        """
        found: dict[str, str] = {}
        todo = [self.template]
        while todo:
            name = todo.pop()
            if name in found:
                continue
            found[name] = (CSRC / name).read_text(encoding="utf-8")
            for double, single, computed in _REFERENCE.findall(found[name]):
                if computed:
                    raise ValueError(
                        f"{name}: template {computed}: expected a quoted path, an expression cannot be followed"
                    )
                todo.append(double or single)
        return found


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


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"context holds {value!r}: expected numbers, texts, lists, dicts and dataclasses")


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
