"""Checks that a model's files are what was published: they are hashed before they are loaded, where
their hashes are known.

The catalog has its models' SHA-256. The hub's cache keeps each file under the hash that the hub
gave: SHA-256 of large files, git's of small ones. For other files no hash is known. A file that
was hashed and has not changed is not hashed again (verdicts.py). Deletes nothing and fetches
nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.core.errors import ModelNotFoundError, WeightsError
from headrace.fetch import verdicts
from headrace.fetch.catalog import (
    CATALOG,
    CatalogEntry,
    Progress,
    cached_bytes,
    cached_path,
    silent,
)
from headrace.fetch.hub import loaded_names, snapshot_id
from headrace.fetch.verdicts import FileState

_CHUNK_BYTES = 1 << 20
_SHA256, _GIT = "sha256", "git-sha1"
_HEX = re.compile(r"[0-9a-f]+")
_HEX_DIGITS = {64: _SHA256, 40: _GIT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The hash that a file should have, and what to do if it has another."""

    digest: str
    algorithm: str = _SHA256
    origin: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A file that had the right hash in this state. Sent from the HTTP to the engine process."""

    path: str
    digest: str
    algorithm: str
    state: FileState
    is_settled: bool  # any change after it was hashed would show in the state


@dataclass(frozen=True, slots=True)
class Checked:
    """The files of a model that were checked: none where no hashes are known."""

    files: tuple[CheckedFile, ...] = ()

    def confirm(self) -> None:
        """Raises if a file changed since: what was read meanwhile must be what was checked."""
        for file in self.files:
            try:
                state = FileState.of(Path(file.path))
            except OSError as error:
                raise _unreadable(Path(file.path), error) from error
            if state != file.state:
                raise WeightsError(
                    f"{file.path} changed while it was being loaded, after it was verified.",
                    "Load it again once whatever writes there has finished.",
                )


def check_model(
    path: Path,
    *,
    again: bool = False,
    before: Checked | None = None,
    progress: Progress = silent,
) -> Checked:
    """Refuses a model (a file or a folder) if one of its files is not what was published.

    `before` is what another process checked: the same files must still have the same content.
    `again` hashes the files even if a verdict is remembered.
    """
    if before is not None and before.files:
        expected = {Path(file.path): _expected_again(file) for file in before.files}
        trusted = {Path(file.path): file.state for file in before.files if file.is_settled}
    else:
        expected, trusted = expected_hashes(path), {}
    return Checked(
        tuple(
            _check(each, wanted, trusted.get(each), again=again, progress=progress)
            for each, wanted in expected.items()
        )
    )


def is_verified(path: Path) -> bool | None:
    """Whether it was hashed since it last changed, with the right hash; None: no hash is known."""
    expected = expected_hashes(path)
    if not expected or len(expected) < len(_files(path.absolute())):
        return None
    try:
        return all(
            verdicts.recall(each, FileState.of(each)) == _written(wanted)
            for each, wanted in expected.items()
        )
    except OSError:
        return False


def cached_file(entry: CatalogEntry) -> Path:
    """The path of the entry's cached file, complete or not."""
    path = cached_path(entry)
    if cached_bytes(entry) is None:
        raise ModelNotFoundError(
            f"{entry.name} is not in the cache ({path}).", f"Run `headrace pull {entry.name}`."
        )
    return path


def is_intact(entry: CatalogEntry, *, progress: Progress = silent) -> bool:
    """Hashes the cached file; returns whether it is the catalog's."""
    found, _, _ = _examine(cached_path(entry), of_entry(entry), progress)
    return found == entry.sha256


def expected_hashes(path: Path) -> dict[Path, Expected]:
    """The expected hash of each file that loading `path` reads, where one is known."""
    absolute = path.absolute()
    for entry in CATALOG.values():
        if absolute == cached_path(entry):
            return {absolute: of_entry(entry)}
    found = {each: _of_hub(each) for each in _files(absolute)}
    return {each: wanted for each, wanted in found.items() if wanted is not None}


def _files(path: Path) -> list[Path]:
    """The files that loading reads: the model's file, or those in its folder."""
    if not path.is_dir():
        return [path]
    try:
        names = [each.name for each in path.iterdir()]
    except OSError:  # opening it later gives the reason
        return []
    return [path / name for name in sorted(loaded_names(names))]


def of_entry(entry: CatalogEntry) -> Expected:
    return Expected(
        digest=entry.sha256,
        origin=f"as the catalog has {entry.name}",
        remedy=f"Run `headrace rm {entry.name}` and `headrace pull {entry.name}` to fetch it "
        "again; if the change is yours, keep it under another name and give its path.",
    )


def hash_file(path: Path, what: str, progress: Progress) -> str:
    """Its SHA-256."""
    with path.open("rb") as file:
        return _hash(file, what, progress, _SHA256)


def _of_hub(path: Path) -> Expected | None:
    """The hub's cache names files by their hashes, and has links to them under the file names."""
    try:
        target = Path(os.readlink(path))
    except OSError:  # not a link: put there by hand, or a system without links
        return None
    algorithm = _HEX_DIGITS.get(len(target.name))
    if target.parent.name != "blobs" or algorithm is None or not _HEX.fullmatch(target.name):
        return None
    hub_id = snapshot_id(path)
    fetch = f"`headrace pull {hub_id}`" if hub_id else "the hub's tool"
    return Expected(
        digest=target.name,
        algorithm=algorithm,
        origin="as the hub has it",
        remedy=f"Delete {path} and {path.parent / target}, and fetch it again with {fetch}.",
    )


def _expected_again(file: CheckedFile) -> Expected:
    return Expected(
        digest=file.digest,
        algorithm=file.algorithm,
        origin="as it was when the server started",
        remedy="Put back the file that was there, or start the server again.",
    )


def _check(
    path: Path, expected: Expected, trusted: FileState | None, *, again: bool, progress: Progress
) -> CheckedFile:
    def checked(state: FileState, is_settled: bool) -> CheckedFile:
        return CheckedFile(
            path=str(path),
            digest=expected.digest,
            algorithm=expected.algorithm,
            state=state,
            is_settled=is_settled,
        )

    try:
        state = FileState.of(path)
        if not again and (state == trusted or verdicts.recall(path, state) == _written(expected)):
            return checked(state, True)
        found, state, is_settled = _examine(path, expected, progress)
    except OSError as error:
        raise _unreadable(path, error) from error
    if found != expected.digest:
        raise WeightsError(
            f"{path} is damaged or a different file: its {expected.algorithm} is {found}, expected "
            f"{expected.digest}, {expected.origin}. Nothing was loaded or deleted.",
            expected.remedy,
        )
    return checked(state, is_settled)


def _examine(path: Path, expected: Expected, progress: Progress) -> tuple[str, FileState, bool]:
    """The file's hash, the state it was in, and whether a later change would show in the state. A
    right hash is remembered."""
    began_ns = time.time_ns()
    with path.open("rb") as file:
        state = FileState.of(file.fileno())
        found = _hash(file, f"verifying {path.name}", progress, expected.algorithm)
        is_settled = FileState.of(file.fileno()) == state and state.is_settled(began_ns)
    if is_settled and found == expected.digest:
        verdicts.remember(path, state, _written(expected))
    return found, state, is_settled


def _hash(file: IO[bytes], what: str, progress: Progress, algorithm: str) -> str:
    total_bytes = os.fstat(file.fileno()).st_size
    if algorithm == _SHA256:
        digest = hashlib.sha256()
    else:  # git's blob hash, of a file's length and content
        digest = hashlib.sha1(f"blob {total_bytes}\0".encode(), usedforsecurity=False)
    done_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        done_bytes += len(chunk)
        progress(what, done_bytes, total_bytes)
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> WeightsError:
    return WeightsError(
        f"{path}: can't be read: {error.strerror}.", "Check the path and its permissions."
    )


def _written(expected: Expected) -> str:
    return f"{expected.algorithm}:{expected.digest}"
