"""A replica of the deployment: Ray Serve's worker with one Headrace server.

It passes requests on, says how full it is for the autoscaler, and whether it lives. Knows the
server; not who asks or how many others there are.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from headrace.policies.routing import Wanted
from headrace.ray_serve.child import Child, Head, Lost, ReplicaError
from headrace.ray_serve.settings import read_settings

# Of the answer's connection, or set anew by whoever sends it on.
_NOT_PASSED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
)
_GAUGE = re.compile(
    rb"^headrace:(pending_prefill_seconds|saturation|slo_headroom)(?:\{[^}]*\})? (\S+)$", re.M
)


@dataclass(slots=True, kw_only=True)
class Sent:
    """A request on its way: what the choice of a replica depends on, and where it was sent."""

    wanted: Wanted
    tried: list[str] = field(default_factory=list)  # replicas, in the order of sending


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An answer's head with its first bytes: until they come, another replica can be asked."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    is_whole: bool  # nothing follows


class HeadraceReplica:
    async def start(self, settings: dict[str, Any]) -> None:
        self._settings = read_settings(settings)
        words = self._settings.command(os.cpu_count() or 1)
        self._child = await Child.start(words, self._settings.start_s)

    async def close(self) -> None:
        """Running requests finish first."""
        child = getattr(self, "_child", None)  # it may never have started
        if child is not None:
            await child.stop(self._settings.drain_s + 5.0)

    async def answer(self, sent: Sent, request: bytes, body: bytes) -> AsyncIterator[Any]:
        """A `Begun`, then bytes as they come. `sent` has been read already, by the router."""
        head: Head | None = None
        early: list[bytes] = []
        has_begun = False
        async with contextlib.aclosing(self._child.ask(request, body)) as parts:
            async for part in parts:
                if isinstance(part, Head):
                    head = part
                elif has_begun:
                    yield part
                else:
                    early.append(part)
                    # An answer that is no stream goes out when it is whole: until then it can be
                    # asked for elsewhere.
                    if head is not None and "text/event-stream" in head.get("content-type"):
                        has_begun = True
                        yield self._begun(head, early, is_whole=False)
        if head is None:
            raise Lost("the answer has no head")
        if not has_begun:
            yield self._begun(head, early, is_whole=True)

    def _begun(self, head: Head, early: list[bytes], *, is_whole: bool) -> Begun:
        kept = tuple(each for each in head.headers if each[0] not in _NOT_PASSED)
        return Begun(status=head.status, headers=kept, body=b"".join(early), is_whole=is_whole)

    # -- what Ray Serve calls --------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises if the server is gone or does not answer. An engine that is being restarted is not
        a reason to replace the replica: that takes longer."""
        if not self._child.is_running:
            raise ReplicaError("`headrace serve` has ended.")
        status, _ = await self._child.get("/health")
        if status != 200:
            raise ReplicaError(f"GET /health says {status}.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Gauges under the names of policies/scaler.py; one without a value is left out."""
        try:
            status, text = await self._child.get("/metrics")
        except (OSError, Lost, TimeoutError):
            return {}  # it is stopping, or gone: check_health says so
        if status != 200:
            return {}
        names = {"pending_prefill_seconds": "pending_prefill_s", "slo_headroom": "headroom"}
        found = {}
        for raw_name, value in _GAUGE.findall(text):
            name = raw_name.decode()
            found[names.get(name, name)] = float(value)
        return found

    def processes(self) -> dict[str, Any]:
        """For tests and for people: which processes, and what Ray lets them see."""
        return {
            "pid": os.getpid(),
            "server_pid": self._child.pid,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }
