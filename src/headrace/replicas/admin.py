"""The port for operators (--admin-port): probes, the page and what it shows, drains and rolls.

Needs no key unless there is one for operators. Knows paths; front.py answers.
"""

from __future__ import annotations

import asyncio

from headrace.replicas.front import RESTART, ReplicasRouter
from headrace.router.front import ClientConnection
from headrace.router.request import Request
from headrace.router.router import OPERATORS_PATHS, NotFoundError
from headrace.server.access.operators import ADMIN_PATHS


class AdminPort:
    """A front.Handler."""

    def __init__(self, router: ReplicasRouter) -> None:
        self._router = router

    def handle(self, client: ClientConnection, request: Request) -> asyncio.Task[None] | None:
        if request.path not in ADMIN_PATHS | OPERATORS_PATHS | {RESTART}:
            client.refuse(
                NotFoundError(f"{request.path[:200]!r} is not served on the port for operators.")
            )
            return None
        request.is_admin = True
        return self._router.handle(client, request)
