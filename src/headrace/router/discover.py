"""Replicas by name: every address of a DNS name, or every ready pod of a Kubernetes service.

The name is looked up again and again; who appears is added, who disappears gets no new requests. A
look-up that fails changes nothing: heartbeats decide. Knows names; no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.client.connection import Address
from headrace.core.errors import ConfigError
from headrace.router.fleet import Fleet
from headrace.router.kubernetes import Cluster, Service

LOOK_S = 5.0
_LABEL = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_SERVICE = re.compile(rf"((?P<space>{_LABEL})/)?(?P<name>{_LABEL}):(?P<port>{_LABEL})")

log = logging.getLogger(__name__)


class Source(Protocol):
    @property
    def shown(self) -> str: ...

    async def addresses(self) -> set[Address]:
        """Of all replicas. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """Of DNS: a headless service of Kubernetes has an address for each pod."""

    host: str
    port: int

    @property
    def shown(self) -> str:
        return self.host

    async def addresses(self) -> set[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return {
            Address(scheme="http", host=str(address[0]), port=self.port, path="")
            for *_, address in found
        }


def parse_discover(text: str) -> Source:
    kind, _, rest = text.partition(":")
    host, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if kind == "dns" and host and ":" not in host and "/" not in host and is_port:
        return Name(host=host, port=int(port))
    if kind == "k8s" and (found := _SERVICE.fullmatch(rest)) and (is_port or not port.isdigit()):
        return Service(
            name=found["name"],
            port=port,
            namespace=found["space"] or "",
            cluster=Cluster.around(),
        )
    raise ConfigError(
        f"--discover is {text!r}; expected dns:NAME:PORT or k8s:NAMESPACE/SERVICE:PORT.",
        "Write it as dns:headrace.default.svc:8000 or k8s:default/headrace:8000.",
    )


class Discovery:
    def __init__(self, source: Source, fleet: Fleet, version: str = "") -> None:
        self._source, self._fleet, self._version = source, fleet, version
        self._failed = False

    async def look(self) -> bool:
        """Whether anything has changed."""
        group = self._fleet.groups[self._version]
        try:
            wanted = {address.url: address for address in await self._source.addresses()}
        except OSError as error:
            if not self._failed:
                why = error.strerror or error
                log.warning("%s was not found: %s", self._source.shown, why)
            self._failed = True
            return False
        self._failed = False
        known = {replica.url: replica for replica in group.replicas.values()}
        for url in sorted(wanted.keys() - known.keys()):
            log.info("%s was found", url, extra={"event": "replica_found"})
            self._fleet.add(self._version, wanted[url])
        for url in known.keys() - wanted.keys():
            log.info("%s is gone from %s", url, self._source.shown, extra={"event": "replica_gone"})
            self._fleet.remove(known[url])
        return wanted.keys() != known.keys()

    async def follow(self, changed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if await self.look():
                changed()
