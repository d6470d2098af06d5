"""A `headrace serve` of any source folder, started to be attacked, and what can be seen of it from
outside: memory and descriptors of all its processes, its log, its metrics.

Knows processes and files; not who attacks, nor how.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
START_LIMIT_S = 120.0  # machines are shared
CORES = 2

# -P: what lies in the current folder is not ours to import. The first cores that there are.
_RUN = (
    "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}]); "
    "from headrace.cli.commands import main; main()"
)
_BLOCKS = re.compile(r'^headrace:kv_blocks\{.*state="used".*\} (\S+)$', re.MULTILINE)
_RESTARTS = re.compile(r"^headrace:engine_restarts_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Held:
    """What the server's processes hold; `others` are children beside the engine."""

    http_bytes: int
    engine_bytes: int
    others_bytes: int
    descriptors: int  # of the process that speaks HTTP

    @property
    def bytes(self) -> int:
        return self.http_bytes + self.engine_bytes + self.others_bytes


class AttackedServer:
    def __init__(
        self,
        folder: Path,
        flags: Sequence[str] = (),
        *,
        source: Path = SOURCE,
        model: str | None = None,
        environment: Mapping[str, str] | None = None,
        working_folder: Path | None = None,
        most_descriptors: int | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        self.working_folder = working_folder
        self.log_path = folder / f"server-{self.port}.log"
        command = [sys.executable, "-P", "-c", _RUN.format(cores=CORES), "serve"]
        command += [] if model is None else [model]
        command += ["--port", str(self.port), "--log-format", "json", *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=working_folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(source.resolve()),
                    "PYTHONUNBUFFERED": "1",
                    "HEADRACE_STATE": str(folder / "state"),
                    **(environment or {}),
                },
                preexec_fn=None if most_descriptors is None else _limiting(most_descriptors),
            )

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- life --------------------------------------------------------------------------------------

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        if not self.is_ready_within(limit_s):
            raise RuntimeError(f"not ready within {limit_s:g} s; its log ends:\n{self.log_tail()}")

    def is_ready_within(self, limit_s: float) -> bool:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and self.is_alive:
            with contextlib.suppress(OSError):
                self.get("/ready", limit_s=5)
                return True
            time.sleep(0.1)
        return False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> int:
        """Its exit status; killed, with its children, if it does not end as asked."""
        children = self._descendants() if self.is_alive else []
        if self.is_alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(45)
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid, *children]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return self.process.wait(10)

    def kill_engine(self) -> None:
        for pid in self.engine_pids():
            os.kill(pid, signal.SIGKILL)

    # -- what it holds -----------------------------------------------------------------------------

    def engine_pids(self) -> list[int]:
        found = self._descendants()
        engines = [pid for pid in found if "engine_process" in _command_line(pid)]
        return engines or found[:1]

    def held(self) -> Held:
        engines = self.engine_pids()
        others = [pid for pid in self._descendants() if pid not in engines]
        return Held(
            http_bytes=_resident_bytes(self.process.pid),
            engine_bytes=sum(map(_resident_bytes, engines)),
            others_bytes=sum(map(_own_bytes, others)),
            descriptors=_descriptors(self.process.pid),
        )

    def cpu_s(self) -> float:
        """Of all its processes that live, since they began."""
        ticks = sum(map(_ticks, [self.process.pid, *self._descendants()]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def engine_environment(self) -> dict[str, str]:
        """What the operating system shows of it."""
        found: dict[str, str] = {}
        for pid in self.engine_pids():
            for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = pair.decode("utf-8", "replace").partition("=")
                found[name] = value
        return found

    def _descendants(self) -> list[int]:
        found, new = list[int](), [self.process.pid]
        while new:
            pid = new.pop()
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    children = [int(child) for child in (task / "children").read_text().split()]
                    found += children
                    new += children
        return sorted(set(found))

    # -- what it says ------------------------------------------------------------------------------

    def get(self, path: str, *, limit_s: float = 30.0, key: str | None = None) -> str:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        asked = urllib.request.Request(self.base_url + path, headers=headers)
        with urllib.request.urlopen(asked, timeout=limit_s) as reply:
            text: str = reply.read().decode()
            return text

    def used_blocks(self, key: str | None = None) -> int | None:
        """None while nobody says."""
        return _count(_BLOCKS, self._metrics(key))

    def restarts(self, key: str | None = None) -> int:
        found = _count(_RESTARTS, self._metrics(key))
        # A server that is gone counts no more; its log did.
        return self.log_text().count("starting another") if found is None else found

    def _metrics(self, key: str | None) -> str:
        with contextlib.suppress(OSError):
            return self.get("/metrics", key=key, limit_s=10)
        return ""

    def wait_free(self, limit_s: float, key: str | None = None) -> int | None:
        """Blocks in use once they are none, or when the time is over."""
        end_s = time.monotonic() + limit_s
        used = self.used_blocks(key)
        while used != 0 and time.monotonic() < end_s and self.is_alive:
            time.sleep(0.2)
            used = self.used_blocks(key)
        return used

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def log_errors(self) -> list[str]:
        """Lines of level error or worse, and whatever is no line of ours."""
        found = []
        for line in self.log_text().splitlines():
            level = _level(line)
            if level in ("error", "critical") or level is None:
                found.append(line)
        return found


def _level(line: str) -> str | None:
    try:
        said: Any = json.loads(line)
    except ValueError:
        return None
    return str(said.get("level", "")).lower() if isinstance(said, dict) else None


def _limiting(most: int) -> Any:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    return limit


def _count(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(float(found[1]))


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _own_bytes(pid: int) -> int:
    """Its share of the memory that it has with others: forks have most of theirs together."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0  # it is gone


def _ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def _descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0
