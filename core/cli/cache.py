"""``attnloom cache``: what lies in the cache of built modules, and what need not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnloom.core.cli.text import ago, count, parse_duration, parse_size, size

app = typer.Typer(help="Built modules: list, prune, unpack.", no_args_is_help=True)


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the modules, the one used last first."""
    from attnloom.core.jit.cache import Cache
    from attnloom.core.jit.inventory import entries
    from attnloom.core.settings import settings

    cache = Cache(settings().cache_dir)
    found = sorted(entries(cache), key=lambda entry: entry.used, reverse=True)
    if as_json:
        listed = [{**vars(entry), "folder": str(entry.folder)} for entry in found]
        print(json.dumps({"cache": str(cache.root), "entries": listed}, indent=1))
        return
    console = Console()
    if found:
        table = Table(box=None, pad_edge=False)
        for name in ("module", "size", "used", "built", "for", "state"):
            table.add_column(name, justify="right" if name == "size" else "left", no_wrap=name == "module")
        for entry in found:
            state = entry.state if entry.state == "ok" else f"[yellow]{entry.state}[/]"
            table.add_row(
                f"{entry.name}-{entry.key}", size(entry.size), ago(entry.used), ago(entry.built), entry.arch, state
            )
        console.print(table)
        for entry in found:
            if entry.state in ("damaged", "refused"):
                console.print(escape(entry.reason), highlight=False, soft_wrap=True)
    console.print(
        f"{count(len(found), 'module')}, {size(sum(entry.size for entry in found))}, in {cache.root}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Modules that were last used longer ago, e.g. 30d.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The ones used longest ago, until no more than this is left: 500M."),
    ] = None,
    stale: Annotated[
        bool,
        typer.Option(
            "--stale",
            help="Modules that were built by other sources than this attnloom's, that are damaged or refused, "
            "and logs of failed builds. Another version that shares the cache builds its own again.",
        ),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove modules that meet any of the conditions. Programs that have loaded them are not disturbed."""
    from attnloom.core.jit.cache import Cache
    from attnloom.core.jit.inventory import choose, entries, remove
    from attnloom.core.settings import settings

    age = None if older_than is None else parse_duration(older_than)
    room = None if max_size is None else parse_size(max_size)
    if age is None and room is None and not stale and not everything:
        raise typer.BadParameter("expected one of --older-than, --max-size, --stale, --all")
    cache = Cache(settings().cache_dir)
    found = entries(cache)
    chosen = found if everything else choose(found, older_than=age, max_size=room, unusable=stale)
    gone = chosen if dry_run or not chosen else remove(cache, chosen)
    console = Console(highlight=False)
    for entry in gone:
        console.print(
            f"{'would remove' if dry_run else 'removed'} {entry.folder.name}  {size(entry.size)}  {entry.state}"
        )
    busy = len(chosen) - len(gone)
    console.print(
        f"{count(len(gone), 'module')}, {size(sum(entry.size for entry in gone))}"
        + (f"; {busy} in use by a build" if busy else "")
        + f"; {count(len(found) - len(gone), 'module')} left in {cache.root}"
    )


@app.command()
def unpack(bundle: Annotated[Path, typer.Argument(help="What `attnloom build --bundle` wrote.")]) -> None:
    """Install a bundle of modules. No compiler is needed, then or later; the processor must be of the same kind."""
    from attnloom.core.jit import bundle as bundles
    from attnloom.core.jit.arch import host_arch
    from attnloom.core.jit.cache import Cache
    from attnloom.core.settings import settings

    cache = Cache(settings().cache_dir)
    found = bundles.unpack(bundle, cache)
    console = Console(highlight=False)
    for module in found:
        console.print(f"{'installed' if module.new else 'was there'} {module.library.parent.name}  for {module.arch}")
    console.print(f"{count(len(found), 'module')} in {cache.root}")
    here = host_arch().name
    strange = sorted({module.arch for module in found if module.arch != here and not module.arch.startswith("sm")})
    if strange:
        raise ValueError(
            f"{bundle} has modules for {', '.join(strange)}, and this machine is {here}: it will not find them. "
            f"Make the bundle on a machine of its kind."
        )
