"""What a server prints while it starts: a line per phase, then its address and a command to try.

Plain text on standard error, or log records where JSON logs were chosen. Decides nothing and starts
nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
import time
from dataclasses import dataclass

from headrace.core.server_config import LogFormat
from headrace.core.terminal import paint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The facts printed about a server that is ready."""

    url: str
    model: str
    fingerprint: str
    context_tokens: int
    kv_tokens: int
    has_chat: bool
    has_keys: bool


class StartUp:
    def __init__(self, log_format: LogFormat, began_s: float | None = None) -> None:
        self._as_log = log_format is LogFormat.JSON
        self._began_s = time.perf_counter() if began_s is None else began_s

    def phase(self, name: str, seconds: float, what: str = "") -> None:
        if self._as_log:
            log.info("start: %s", name, extra={"event": "phase", "phase": name, "seconds": seconds})
        else:
            say(f"  {name:<12}{seconds:5.2f} s   {what}".rstrip())

    def engine_ready(self, seconds: float, pid: int) -> None:
        if self._as_log:
            facts = {"event": "phase", "phase": "engine", "seconds": seconds, "engine_pid": pid}
            log.info("start: engine", extra=facts)
        else:
            say(f"  engine ready in {seconds:.2f} s (pid {pid})")

    def note(self, text: str) -> None:
        if self._as_log:
            log.warning("%s", text, extra={"event": "note"})
        else:
            say(f"{paint('note:', 'yellow', sys.stderr)} {text}")

    def ready(self, serving: Serving) -> None:
        seconds = time.perf_counter() - self._began_s
        if self._as_log:
            facts = {name: getattr(serving, name) for name in Serving.__slots__}
            log.info("ready", extra={"event": "ready", "seconds": round(seconds, 3), **facts})
        else:
            ready = paint(f"ready after {seconds:.2f} s", "bold green", sys.stderr)
            say(f"{ready}\n\n{_described(serving)}\n")


def _described(serving: Serving) -> str:
    keys = "every request needs one" if serving.has_keys else "none: no authentication"
    rows = {
        "URL": f"{serving.url}/v1",
        "page": f"{serving.url}/",
        "model": f"{serving.model} ({serving.fingerprint})",
        "context": f"{serving.context_tokens:,} tokens",
        "KV pool": f"{serving.kv_tokens:,} tokens",
        "keys": keys,
    }
    lines = [f"  {paint(f'{name:<9}', 'bold', sys.stderr)}{value}" for name, value in rows.items()]
    return "\n".join(
        [
            *lines,
            "",
            "Try it:",
            f"  {curl_line(serving)}",
            "",
            "Ctrl-C lets running requests finish, then stops; a second one stops at once.",
        ]
    )


def curl_line(serving: Serving) -> str:
    """A command to paste into a shell; the key comes from a shell variable and is never printed."""
    # With max_tokens: a small model may not stop by itself, and this is a user's first request.
    body: dict[str, object] = {"model": serving.model, "max_tokens": 64}
    if serving.has_chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Name three rivers."}]
    else:
        path = "/v1/completions"
        body["prompt"] = "Once upon a time"
    words = ["curl", f"{serving.url}{path}", "-H", "Content-Type: application/json"]
    line = " ".join(shlex.quote(word) for word in words)
    if serving.has_keys:
        line += ' -H "Authorization: Bearer $HEADRACE_API_KEY"'
    return f"{line} -d {shlex.quote(json.dumps(body))}"


def say(text: str) -> None:
    # The server starts even if standard error is closed or its disk is full.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
