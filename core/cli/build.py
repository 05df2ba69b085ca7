"""``attnloom build``: fills the cache ahead of time, and packs it for machines without a compiler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnloom.core.cli import models
from attnloom.core.cli.catalogue import DTYPES, Dtype, dtype_named
from attnloom.core.cli.models import Need
from attnloom.core.cli.text import count, size
from attnloom.core.cli.version import version
from attnloom.core.named import parse_variant

if TYPE_CHECKING:
    from attnloom.core.jit import ModuleSpec


def command(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CONFIG]...", help="config.json of Hugging Face models, or the folders that hold them."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="A variant by name, as in Python: causal, 'causal & soft_cap'; or your own, an entry point, "
            "module:object or file.py:object. May be repeated."
        ),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.toml",
            help="What the server of these models is told to compute: its TOML file, or the name of a variant.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}; default: the model's own, or bf16. May be repeated.")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Elements of a head, for --variant; default 128. May be repeated.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Pack the modules into a tar.gz for `attnloom cache unpack`.")
    ] = None,
) -> None:
    """Compile what models or variants need, into the cache: nothing is compiled when a server starts then.

    As many compilers run at once as cores and memory allow.
    """
    if not configs and not variant:
        raise typer.BadParameter("expected a model's config.json, or --variant")
    if head_dim and not variant:
        raise typer.BadParameter("--head-dim goes with --variant; a model says its own")
    if variants and not configs:
        raise typer.BadParameter("--variants goes with a model's config.json; --variant names one alone")
    if bundle is not None:
        _check_bundle(bundle)
    dtypes: list[Dtype | None] = [dtype_named(name) for name in dtype or ()]
    wanted = _of_models(configs or (), dtypes or [None], variants) + [
        Need(parse_variant(text), dim, chosen or DTYPES["bf16"], text)
        for text in variant or ()
        for chosen in dtypes or [None]
        for dim in head_dim or [128]
    ]
    specs = _specs(wanted)
    console = Console(highlight=False)
    libraries = _build(console, specs)
    for need, spec in zip(wanted, specs[1:], strict=True):
        console.print(f"{spec.name}  {need.why}", soft_wrap=True)
    console.print(f"{count(len(set(libraries)), 'module')} in {libraries[0].parents[1]}", soft_wrap=True)
    if bundle is not None:
        from attnloom.core.jit.arch import host_arch
        from attnloom.core.jit.bundle import pack

        packed = pack(libraries, bundle, version=version())
        console.print(f"packed into {bundle}, {size(packed)}, for {host_arch().name}", soft_wrap=True)


def _check_bundle(file: Path) -> None:
    """Where a bundle cannot be written is a ValueError before anything is compiled for it."""
    if file.is_dir():
        raise ValueError(f"--bundle {file}: is a folder, expected a file to write")
    if file.exists() and not file.is_file():
        raise ValueError(f"--bundle {file}: is no plain file, expected one to write")
    if not file.parent.is_dir():
        raise ValueError(f"--bundle {file}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"--bundle {file}: user {os.geteuid()} cannot write the folder {file.parent}")


def _of_models(configs: Sequence[Path], dtypes: Sequence[Dtype | None], variants: str | None) -> list[Need]:
    chosen = None
    if variants is not None:
        # Imported late, as everything that needs torch.
        from attnloom.core.serving_options import choice

        chosen = choice({"variants": variants})
    return [need for file in configs for dtype in dtypes for need in models.needs(file, dtype, chosen)]


def _specs(wanted: Sequence[Need]) -> list[ModuleSpec]:
    """The host module, and one for each need. What no kernel serves is a ValueError that says what does."""
    import torch

    from attnloom.core.host import host_spec
    from attnloom.core.kernels import attention_spec
    from attnloom.core.params import check_captures
    from attnloom.core.tiles import HEAD_DIMS, family_for

    family = family_for(torch.device("cpu"))
    specs = [host_spec()]
    for need in wanted:
        if need.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={need.head_dim} ({need.why}): expected one of {HEAD_DIMS}")
        if need.dtype.torch() not in family.dtypes:
            raise ValueError(f"dtype={need.dtype.name} ({need.why}): expected one of {family.dtypes}")
        try:
            check_captures(need.variant.params, need.variant.captures, {"head_dim": need.head_dim})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{need.why}, head_dim={need.head_dim}: {error}") from error
        specs.append(attention_spec(family.name, need.dtype.torch(), need.head_dim, need.head_dim, need.variant))
    return specs


def _build(console: Console, specs: Sequence[ModuleSpec]) -> list[Path]:
    from attnloom.core.jit import build
    from attnloom.core.jit.build import locate
    from attnloom.core.jit.ninja import job_limit

    missing = [spec.name for spec in dict.fromkeys(specs) if locate(spec) is None]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not missing) as progress:
        at_once = count(min(job_limit(), len(missing)), "compiler")
        task = progress.add_task(f"compiling, {at_once} at once", total=len(missing))

        def built(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total)
            progress.console.print(f"compiled {name}")

        return build(specs, progress=built)
