"""Replicas by name: every address that a DNS name has is one, as in a Kubernetes headless service.

The name is looked up again and again; who appears is added, who disappears gets no new requests. A
look-up that fails changes nothing: heartbeats decide. Knows names; no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.client.connection import Address
from headrace.core.errors import ConfigError
from headrace.router.fleet import Fleet

LOOK_S = 5.0

log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[set[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    host: str
    port: int


def parse_discover(text: str) -> Name:
    kind, _, rest = text.partition(":")
    host, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if kind != "dns" or not host or ":" in host or "/" in host or not is_port:
        raise ConfigError(
            f"--discover is {text!r}; expected dns:NAME:PORT.",
            "Write it as dns:headrace.default.svc:8000.",
        )
    return Name(host=host, port=int(port))


async def resolve(host: str, port: int) -> set[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class Discovery:
    def __init__(
        self, name: Name, fleet: Fleet, version: str = "", look_up: Resolve = resolve
    ) -> None:
        self._name, self._fleet, self._version = name, fleet, version
        self._resolve = look_up
        self._failed = False

    async def look(self) -> bool:
        """Whether anything has changed."""
        name, group = self._name, self._fleet.groups[self._version]
        try:
            hosts = await self._resolve(name.host, name.port)
        except OSError as error:
            if not self._failed:
                log.warning("%s has no address: %s", name.host, error.strerror or error)
            self._failed = True
            return False
        self._failed = False
        wanted = {
            address.url: address
            for address in (
                Address(scheme="http", host=host, port=name.port, path="") for host in hosts
            )
        }
        known = {replica.url: replica for replica in group.replicas.values()}
        for url in sorted(wanted.keys() - known.keys()):
            log.info("%s was found", url, extra={"event": "replica_found"})
            self._fleet.add(self._version, wanted[url])
        for url in known.keys() - wanted.keys():
            log.info("%s is gone from %s", url, name.host, extra={"event": "replica_gone"})
            self._fleet.remove(known[url])
        return wanted.keys() != known.keys()

    async def follow(self, changed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if await self.look():
                changed()
