"""What is printed while replicas start: a line for each, then the address and a command to try.

As server/start/banner.py does for one server. Decides nothing and starts nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from headrace.core.server_config import LogFormat
from headrace.core.terminal import paint
from headrace.replicas.slot import Slot
from headrace.server.start.banner import Serving, StartUp, curl_line, say

log = logging.getLogger(__name__)


class Announcer:
    def __init__(self, log_format: LogFormat, began_s: float) -> None:
        self._as_log = log_format is LogFormat.JSON
        self._began_s = began_s
        self.start_up = StartUp(log_format, began_s)

    def note(self, text: str) -> None:
        self.start_up.note(text)

    def replica_note(self, number: int, text: str) -> None:
        self.start_up.note(f"replica {number} {text}" if " " in text else text)

    def replica(self, slot: Slot, seconds: float) -> None:
        what = f"pid {slot.pid}, {slot.address.url}, {slot.share.shown}"
        self.start_up.phase(f"replica {slot.number}", seconds, what)

    def ready(self, url: str, slots: Sequence[Slot], total: int, *, has_keys: bool) -> None:
        facts = slots[0].facts
        assert facts is not None
        serving = Serving(
            url=url,
            model=facts.model,
            fingerprint=facts.fingerprint,
            context_tokens=facts.context_tokens,
            kv_tokens=facts.kv_tokens,
            has_chat=facts.has_chat,
            has_keys=has_keys,
        )
        seconds = time.perf_counter() - self._began_s
        if self._as_log:
            shown = {name: getattr(serving, name) for name in Serving.__slots__}
            extra = {"event": "ready", "seconds": round(seconds, 3), "replicas": len(slots)}
            log.info("ready", extra=extra | shown)
            return
        count = f"{total}" if len(slots) == total else f"{len(slots)} of {total}"
        keys = "every request needs one" if has_keys else "none: no authentication"
        rows = {
            "URL": f"{url}/v1",
            "page": f"{url}/",
            "model": f"{facts.model} ({facts.fingerprint})",
            "context": f"{facts.context_tokens:,} tokens",
            "KV pool": f"{facts.kv_tokens:,} tokens in each replica",
            "replicas": f"{count}: GET /replicas shows them",
            "keys": keys,
        }
        bold = [f"  {paint(f'{name:<9}', 'bold', sys.stderr)}{what}" for name, what in rows.items()]
        ready = paint(f"ready after {seconds:.2f} s", "bold green", sys.stderr)
        ending = "Ctrl-C lets running requests finish, then stops; a second one stops at once."
        if total > 1:
            ending += (
                "\n`headrace restart` restarts the replicas one by one, without a failed request."
            )
        lines = [ready, "", *bold, "", "Try it:", f"  {curl_line(serving)}", "", ending, ""]
        say("\n".join(lines))
