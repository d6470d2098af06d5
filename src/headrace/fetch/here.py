"""Models that are already on this machine: in our cache (fetched or copied there by hand) and in
the hub's cache. Removes only files in our own cache.

Knows folders, not what is inside the files: weights/ reads those.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError, ModelNotFoundError
from headrace.fetch import hub, verdicts
from headrace.fetch.catalog import (
    CATALOG,
    CatalogEntry,
    cached_path,
    catalog_names,
    find_entry,
    suggest,
)
from headrace.fetch.model_folder import models_folder, storage_errors
from headrace.fetch.verify import is_verified


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    name: str  # as MODEL takes it
    source: str  # "catalog", "file" or "hub"
    path: Path
    size_bytes: int
    modified_s: float  # Unix time
    entry: CatalogEntry | None = None
    loadable: tuple[Path, ...] = ()  # for a hub model: each of its snapshots, or the GGUFs in them

    @property
    def is_whole(self) -> bool:
        """Judged by size, and only for catalog models."""
        return self.entry is None or self.size_bytes == self.entry.size_bytes

    @property
    def is_verified(self) -> bool | None:
        """Whether every loadable file was hashed since it last changed, with the right hash; None:
        no hash is published."""
        found = [is_verified(path) for path in self.loadable or (self.path,)]
        return None if None in found else all(found)


def models_here() -> list[LocalModel]:
    """All local models, the latest first."""
    found = [*_in_our_cache(), *_in_the_hubs()]
    return sorted(found, key=lambda model: -model.modified_s)


def find_ours(name: str) -> LocalModel:
    """The model of that name in our cache; for a hub model or an unknown name, an error."""
    ours = _in_our_cache()
    entry = find_entry(name)
    for model in ours:
        if name == model.name or name == model.path.name or (entry and model.entry == entry):
            return model
    if entry is not None:
        raise ModelNotFoundError(
            f"{entry.name} is not in the cache ({cached_path(entry)}).",
            "`headrace ls` lists the models on this machine.",
        )
    if hub.parse_hub_id(name) is not None:
        raise ConfigError(
            f"{name} is not in Headrace's cache; hub models are in the hub's own cache, which "
            "other programs share.",
            f"Remove it with the hub's own tool: `hf cache rm model/{name}`.",
        )
    if "/" in name or "\\" in name:
        raise ConfigError(
            f"{name!r} is a path; expected a model in the cache ({models_folder()}).",
            "Delete that file yourself, or give a name that `headrace ls` lists.",
        )
    known = [*catalog_names(), *(model.name for model in ours)]
    raise ModelNotFoundError(
        f"There is no model named {name!r} in the cache; {suggest(name, known)}.",
        "`headrace ls` lists the models on this machine.",
    )


def remove_ours(model: LocalModel) -> int:
    """Deletes the model's file and returns the bytes freed. A link is removed, never its target."""
    folder = models_folder()
    if model.source == "hub" or model.path.parent != folder:
        raise ConfigError(
            f"{model.path} is not in the cache ({folder}); Headrace deletes nothing outside it.",
            "Delete it yourself.",
        )
    freed_bytes = 0 if model.path.is_symlink() else model.size_bytes
    verdicts.forget(model.path)
    with storage_errors(folder):
        model.path.unlink(missing_ok=True)
    return freed_bytes


def _in_our_cache() -> list[LocalModel]:
    by_path = {cached_path(entry): entry for entry in CATALOG.values()}
    folder = models_folder()
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
    except OSError:
        return []
    found = []
    for path in paths:
        try:
            facts = path.stat()
        except OSError:  # a dangling link is still listed and can be removed
            facts = path.lstat()
        entry = by_path.get(path)
        found.append(
            LocalModel(
                name=path.name if entry is None else entry.name,
                source="file" if entry is None else "catalog",
                path=path,
                size_bytes=facts.st_size,
                modified_s=facts.st_mtime,
                entry=entry,
            )
        )
    return found


def _in_the_hubs() -> list[LocalModel]:
    return [
        LocalModel(
            name=found.name,
            source="hub",
            path=found.folder,
            size_bytes=found.size_bytes,
            modified_s=found.modified_s,
            loadable=found.loadable,
        )
        for found in hub.cached_repositories()
    ]
