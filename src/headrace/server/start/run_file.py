"""A run file per running server: model, address, start time. `headrace ps` reads it.

    state folder/servers/PID.json    locked for as long as the server lives

The lock tells a running server from the file of a killed one, even if its process id was reused. A
server that can't write its run file runs all the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.state import make_private, open_private, state_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    pid: int
    url: str
    model: str
    context_tokens: int
    has_keys: bool
    started_s: float  # Unix time


def servers_folder() -> Path:
    return state_folder() / "servers"


class RunFile:
    """The run file of this process; removed when it is closed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @classmethod
    def write(cls, *, url: str, model: str, context_tokens: int, has_keys: bool) -> RunFile | None:
        running = Running(
            pid=os.getpid(),
            url=url,
            model=model,
            context_tokens=context_tokens,
            has_keys=has_keys,
            started_s=round(time.time(), 3),
        )
        try:
            path = make_private(servers_folder()) / f"{running.pid}.json"
            descriptor = open_private(path, os.O_RDWR)
        except (OSError, HeadraceError) as error:
            log.debug("this server won't be listed by `headrace ps`: %s", error)
            return None
        try:
            _lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(asdict(running)).encode())
        except OSError as error:
            log.debug("this server won't be listed by `headrace ps`: %s", error)
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def running_servers() -> list[Running]:
    """The running servers, oldest first. Files of dead ones are removed."""
    found = []
    try:
        paths = sorted(servers_folder().glob("*.json"))
    except OSError:
        return []
    for path in paths:
        with contextlib.suppress(OSError):
            if _is_dead(path):
                path.unlink()
                continue
            if running := _read(path):
                found.append(running)
    return sorted(found, key=lambda running: running.started_s)


def _read(path: Path) -> Running | None:
    try:
        return Running(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError):  # half written, or from another version
        return None


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_dead(path: Path) -> bool:
    """Whether no process holds the file's lock; False where there are no locks."""
    if sys.platform == "win32":
        return False
    import fcntl

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return False
    else:
        return True
    finally:
        os.close(descriptor)
