"""Our side of the conversation with an adapter: a line asked, a line answered, or a reason.

Knows no engine. A process that dies, hangs or answers nonsense is a PeerFailure, never the end of
the run; what it printed last is part of the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent


class PeerFailure(Exception):
    """Why there is no figure."""


class Conversation:
    def __init__(self, python: Path, module: str, env: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=BENCHMARKS,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # so that its servers end with it
        )
        self._pending = b""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def pause(self) -> None:
        """Nothing of it runs until `resume`: engines spin and poll for a while after their work."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in _family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ask(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerFailure(self._why_dead()) from None
        line = self._read_line(time.monotonic() + timeout_s, f"{op}: no answer in {timeout_s:g} s")
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerFailure(f"{op}: not an answer: {line[:100]!r}") from None
        if not isinstance(answer, dict):
            raise PeerFailure(f"{op}: not an answer: {line[:100]!r}")
        if "error" in answer:
            raise PeerFailure(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Ends the process and all that it started; asking it politely first."""
        assert self._process.stdin
        assert self._process.stdout
        self.resume()
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # all gone by themselves
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _read_line(self, deadline: float, late: str) -> bytes:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    os.killpg(self._process.pid, signal.SIGKILL)  # its answer would confuse
                    self._process.wait()
                    raise PeerFailure(late)
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise PeerFailure(self._why_dead())
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _why_dead(self) -> str:
        status = self._process.wait()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        self._log.seek(0)
        printed = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"ended with {how}" + (f": {printed[-1]}" if printed else "")


def _family(pid: int) -> list[int]:
    """A process and all that it started, whatever sessions they made for themselves."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found
