"""Models that are on this machine already: in our cache, by the catalog or by hand, and in the
hub's own cache. Removes only what is ours to remove.

Knows folders; what is inside a file is weights/'s affair.
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
    modified_s: float  # since 1970
    entry: CatalogEntry | None = None
    loadable: tuple[Path, ...] = ()  # of the hub's: each snapshot of it, or the GGUFs there

    @property
    def is_whole(self) -> bool:
        """By size, and only where the catalog knows it."""
        return self.entry is None or self.size_bytes == self.entry.size_bytes

    @property
    def is_verified(self) -> bool | None:
        """Whether all that could be loaded of it was hashed since it last changed, and was right;
        None: nobody knows what it should be."""
        found = [is_verified(path) for path in self.loadable or (self.path,)]
        return None if None in found else all(found)


def models_here() -> list[LocalModel]:
    """All of them, the latest first."""
    found = [*_in_our_cache(), *_in_the_hubs()]
    return sorted(found, key=lambda model: -model.modified_s)


def find_ours(name: str) -> LocalModel:
    """The one of that name in our cache; of a hub's model, or of none, an error says what to do."""
    ours = _in_our_cache()
    entry = find_entry(name)
    for model in ours:
        if name == model.name or name == model.path.name or (entry and model.entry == entry):
            return model
    if entry is not None:
        raise ModelNotFoundError(
            f"{entry.name} is not in the cache ({cached_path(entry)}).",
            "`headrace ls` lists what is here.",
        )
    if hub.parse_hub_id(name) is not None:
        raise ConfigError(
            f"{name} is not in Headrace's cache; models of the hub lie in the hub's own, which "
            "other programs share.",
            f"Remove it with the hub's own tool: `hf cache rm model/{name}`.",
        )
    if "/" in name or "\\" in name:
        raise ConfigError(
            f"{name!r} is a path; only models in the cache ({models_folder()}) are removed.",
            "Delete that file yourself, or give a name that `headrace ls` lists.",
        )
    known = [*catalog_names(), *(model.name for model in ours)]
    raise ModelNotFoundError(
        f"There is no model named {name!r} in the cache; {suggest(name, known)}.",
        "`headrace ls` lists what is here.",
    )


def remove_ours(model: LocalModel) -> int:
    """Deletes the model's file; the bytes that it freed. A link is removed, never what it means."""
    folder = models_folder()
    if model.source == "hub" or model.path.parent != folder:
        raise ConfigError(
            f"{model.path} is not in the cache ({folder}), so it is not ours to delete.",
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
        except OSError:  # a link to nowhere: still something to list and to remove
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
