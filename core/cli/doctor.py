"""``attnloom doctor``: what is here, whether it works, and what to do where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnloom.core.cli.checks import cache, compilers, devices, frameworks, selftest, settings, versions
from attnloom.core.cli.checks.section import Section
from attnloom.core.cli.version import version

CHECKS: dict[str, Callable[[], Section]] = {
    "versions": versions.check,
    "settings": settings.check,
    "devices": devices.check,
    "compilers": compilers.check,
    "cache": cache.check,
    "frameworks": frameworks.check,
    "self-test": selftest.check,
}


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Look at what is installed, and try it. Exit status 1 when something is broken."""
    with Console(stderr=True).status("compiling and trying a kernel ...", spinner="line"):
        sections = [_guarded(name, check) for name, check in CHECKS.items()]
    broken = any(problem.broken for section in sections for problem in section.problems)
    if as_json:
        print(json.dumps(_as_table(sections, ok=not broken), indent=1))
    else:
        _show(sections)
    if broken:
        raise typer.Exit(1)


def _guarded(name: str, check: Callable[[], Section]) -> Section:
    """The section of a check; one that fails is a problem like others, and the next ones are made."""
    try:
        return check()
    except Exception as error:
        section = Section(name)
        section.broken(f"the check itself failed: {type(error).__name__}: {error}", "mend what it names, or report it")
        return section


def _as_table(sections: list[Section], *, ok: bool) -> dict[str, object]:
    return {
        "attnloom": version(),
        "ok": ok,
        "sections": {section.name: section.facts for section in sections},
        "problems": [
            {"section": section.name, **vars(problem)} for section in sections for problem in section.problems
        ],
    }


def _show(sections: list[Section]) -> None:
    console = Console(highlight=False)
    for section in sections:
        broken = any(problem.broken for problem in section.problems)
        mark = "[red]broken[/]" if broken else "[yellow]could be better[/]" if section.problems else "[green]ok[/]"
        console.print(f"[bold]{section.name}[/]  {mark}")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in section.facts.items():
            table.add_row(f"  {name}", escape(_word(value)))
        if section.facts:
            console.print(table)
    problems = [(section.name, problem) for section in sections for problem in section.problems]
    for where, problem in sorted(problems, key=lambda pair: not pair[1].broken):
        color = "red" if problem.broken else "yellow"
        console.print(
            f"\n[{color}]{where}[/]: {escape(problem.what)}\n  [bold]to mend it:[/] {escape(problem.remedy)}",
            soft_wrap=True,
        )
    if not problems:
        console.print("\nNo problems.")


def _word(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
