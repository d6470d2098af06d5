"""Turns what a user typed as MODEL into a path: a file, a folder, a catalog name or a hub id.

Says only where the weights are; weights/ opens and reads them.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.core.errors import HeadraceError, ModelNotFoundError, OfflineError
from headrace.fetch import hub
from headrace.fetch.catalog import (
    DEFAULT_NAME,
    CatalogEntry,
    Progress,
    cached_bytes,
    cached_path,
    catalog_names,
    entry_of,
    find_entry,
    get_entry,
    is_cached,
    silent,
    suggest,
)
from headrace.fetch.model_folder import models_folder
from headrace.fetch.pull import pull
from headrace.fetch.terms import Accept, nobody
from headrace.fetch.wheels import bring, given

# A hub id may contain dots ("org/model-1.1b"), so only known suffixes make a name a path.
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".json", ".zip")
_FALSE = {"", "0", "false", "no", "off"}


def offline_by_environment() -> bool:
    return os.environ.get("HEADRACE_OFFLINE", "").lower() not in _FALSE


def resolve_model(
    name: str | None = None,
    *,
    offline: bool = False,
    progress: Progress = silent,
    accept: Accept = nobody,
) -> Path:
    """The file or folder of MODEL, fetched if needed and allowed; None is the default model.
    `accept` is called where a model has terms.

    A bare catalog name means the catalog even beside a folder of that name: "./name" is the folder.
    """
    offline = offline or offline_by_environment()
    if name is None:
        return _from_catalog(get_entry(DEFAULT_NAME), offline, progress, accept)
    if entry := find_entry(name):
        return _from_catalog(entry, offline, progress, accept)
    if not name.strip() or "\0" in name:
        raise ModelNotFoundError(
            f"MODEL is {name!r}; expected a name, a path or a hub id.",
            "See `headrace models`.",
        )
    path = Path(name).expanduser()
    if _exists(path):
        return path
    if "/" not in name and name in _ggufs(models_folder()):
        return models_folder() / name  # put there by hand
    if _is_path_like(name):
        raise _no_such_path(name, path)
    if hub_id := hub.parse_hub_id(name):
        return hub.fetch(hub_id, offline=offline)
    raise ModelNotFoundError(
        f"Unknown model {name!r}; {suggest(name, [*catalog_names(), *local_files()])}.",
        "Give a name that `headrace models` lists, a GGUF file, a folder with config.json and "
        "safetensors, or a hub id (org/name).",
    )


def name_model(path: Path, typed: str | None) -> str:
    """The name of a model that was resolved to `path`, where the user chose none."""
    if entry := entry_of(path):
        return entry.name
    if typed and not _exists(Path(typed).expanduser()):
        return typed  # a hub id
    absolute = path.absolute()
    return absolute.name if absolute.is_dir() else absolute.stem


def _from_catalog(entry: CatalogEntry, offline: bool, progress: Progress, accept: Accept) -> Path:
    if is_cached(entry):
        return cached_path(entry)
    if offline:
        raise _fetching_is_off(entry)
    return pull(entry, progress=progress, accept=accept)


def refuse_offline(entry: CatalogEntry) -> None:
    """For explicit fetches: HEADRACE_OFFLINE forbids them unless the model is cached already."""
    if offline_by_environment() and not is_cached(entry):
        raise _fetching_is_off(entry)


def _fetching_is_off(entry: CatalogEntry) -> OfflineError:
    found_bytes = cached_bytes(entry)
    state = (
        "is not in the cache"
        if found_bytes is None
        else f"is cached with {found_bytes} bytes instead of {entry.size_bytes}"
    )
    return OfflineError(
        f"{entry.name} {state} ({cached_path(entry)}), and fetching is turned off.",
        f"Run `headrace models pull {entry.name}` with a network and without HEADRACE_OFFLINE, "
        f"or copy {bring(entry)} of {entry.source} here and run "
        f"`headrace models pull {entry.name} --from {given(entry)}`, or give the path of a GGUF "
        "file.",
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for the file system, or not permitted to look
        return False


def _is_path_like(name: str) -> bool:
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or (name.count("/") > 1 and hub.parse_hub_id(name) is None)
        or ("/" in name and ":" not in name and name.lower().endswith(_FILE_ENDINGS))
    )


def _no_such_path(name: str, path: Path) -> HeadraceError:
    folder = path.parent
    if _exists(folder):
        beside = _ggufs(folder)
        known = f"; {suggest(path.name, beside)} in {folder}" if beside else ""
    else:
        known = f"; there is no folder {folder} either"
    return ModelNotFoundError(
        f"There is no file or folder {name!r}{known}.",
        "Check the path; `headrace models` lists the models that can be fetched by name.",
    )


def local_files() -> list[str]:
    return _ggufs(Path.cwd()) + _ggufs(models_folder())


def _ggufs(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir() if p.suffix == ".gguf")
    except OSError:
        return []
