"""The program: its commands, and how it says that something went wrong."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from attnloom.core.cli import build, cache, doctor, plan
from attnloom.core.cli.version import version
from attnloom.core.errors import AttnloomError

app = typer.Typer(
    name="attnloom",
    help="An attention engine for LLM serving: what is installed, what is planned, what is compiled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.command)
app.command("plan")(plan.command)
app.command("build")(build.command)
app.add_typer(cache.app, name="cache")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version())
        raise typer.Exit


@app.callback()
def _options(
    print_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. What a user can mend is said in a line, with exit status 1; a mistyped option gives 2."""
    try:
        app()
    except (AttnloomError, OSError, ValueError) as error:
        print(f"attnloom: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (OverflowError, RecursionError, MemoryError) as error:
        print(f"attnloom: {type(error).__name__}: {error}: a number, a nesting or a file is too large", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
