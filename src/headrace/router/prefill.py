"""Replicas that compute prompts for the others: which one, and where blocks are fetched.

A request still goes to one of the router's replicas, as without these. A header says which of them
computes its prompt; the replica fetches the blocks from there, and computes what does not come. So
nothing here can make a request fail. Knows fleets and heartbeats; no clients.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.client.connection import Address, Unreachable
from headrace.core.errors import ConfigError
from headrace.policies.routing import Wanted
from headrace.router.asked import Asked
from headrace.router.discover import Discovery, Source
from headrace.router.fleet import Fleet
from headrace.router.heartbeat import Get, Heart, getter
from headrace.router.replica import Replica
from headrace.router.settings import RouterSettings
from headrace.router.versions import Version
from headrace.server.edge.listen import is_loopback
from headrace.server.handover.session import Peer
from headrace.server.request.prefill import HEADER

POOL = "prefill"
LEAST_TOKENS = 64  # by its bytes; the replica that answers knows, and decides
PATH = "/handover"
_ANYWHERE = frozenset({"0.0.0.0", "::"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a replica says about hand-overs."""

    role: str
    fingerprint: str
    peer: Peer | None  # where its blocks are fetched


async def read_place(get: Get, address: Address) -> Place:
    """Raises Unreachable."""
    status, body = await get(PATH)
    try:
        found = json.loads(body) if status == 200 else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreachable(f"{PATH} answered {status}: expected a Headrace with the internal key")
    host, port = found.get("host"), found.get("port")
    peer = None
    if isinstance(host, str) and isinstance(port, int) and 0 < port < 65536:
        peer = Peer(address.host if host in _ANYWHERE else host, port)
    return Place(role=str(found.get("role")), fingerprint=str(found.get("fingerprint")), peer=peer)


class _PrefillHeart(Heart):
    """Asks where blocks are fetched too: an engine that was restarted may have another port."""

    def __init__(self, fleet: Fleet, settings: RouterSettings, places: dict[int, Place]) -> None:
        super().__init__(fleet, settings)
        self._places = places

    async def _beat(self, replica: Replica) -> None:
        await super()._beat(replica)
        if not replica.is_up:
            self._places.pop(replica.number, None)
            return
        get = self._gets[replica]
        try:
            place = await read_place(get, replica.address)
        except Unreachable as error:
            self._places.pop(replica.number, None)
            replica.kept_out = error.cause
            return
        if place.peer is None:
            self._places.pop(replica.number, None)
            replica.kept_out = f"its role is {place.role!r}; expected --role prefill"
        else:
            self._places[replica.number] = place


class Prefills:
    def __init__(
        self,
        addresses: Sequence[Address],
        settings: RouterSettings,
        *,
        name: Source | None = None,
    ) -> None:
        self.fleet = Fleet([Version(name=POOL, addresses=tuple(addresses))], settings)
        self._settings = settings
        self._places: dict[int, Place] = {}
        self.heart: Heart = _PrefillHeart(self.fleet, settings, self._places)
        self._discovery = None if name is None else Discovery(name, self.fleet, POOL)
        self._following: asyncio.Task[None] | None = None
        self.sent: Counter[str] = Counter()  # by replica
        self.left: Counter[str] = Counter()  # prompts without one, by reason

    # -- one request -----------------------------------------------------------------------------

    def choose(self, asked: Asked, wanted: Wanted) -> tuple[bytes, Callable[[], None]] | None:
        """The header for a request, and what to call when its prompt was computed; None: the
        replica that answers computes the prompt."""
        if asked.prompt_tokens < LEAST_TOKENS:
            self.left["short"] += 1
            return None
        prompt = replace(wanted, answer_tokens=0)
        replica = self.fleet.choose(prompt, POOL, strict=True)
        place = None if replica is None else self._places.get(replica.number)
        if replica is None or place is None:
            self.left["none"] += 1
            return None
        self.sent[replica.url] += 1
        counted = self.fleet.send(replica, prompt)
        is_open = True

        def end() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                replica.ended(counted.tokens)
                replica.succeeded()

        return f"{HEADER}: {place.peer}\r\n".encode("latin-1"), end

    # -- from the start on -----------------------------------------------------------------------

    async def start(self, decoding: Fleet) -> None:
        """The first heartbeats. Raises where the two pools can't exchange blocks."""
        if self._discovery is not None:
            await self._discovery.look()
        await self.heart.first()
        await self.check(decoding)

    def follow(self) -> None:
        self.heart.follow()
        if self._discovery is not None:
            self._following = asyncio.create_task(self._discovery.follow(self.heart.follow))

    def stop(self) -> None:
        self.heart.stop()
        if self._following is not None:
            self._following.cancel()

    async def check(self, decoding: Fleet) -> None:
        """After the first heartbeats: raises where the two pools can't exchange blocks. Replicas
        that do not answer are left alone."""
        self.fleet.check_mixed()
        first: tuple[Replica, Place] | None = None
        for replica in self.fleet.replicas:
            if replica.is_up and (place := self._places.get(replica.number)) is None:
                raise ConfigError(
                    f"{replica.url} can't compute prompts for others: {replica.kept_out}.",
                    "Start it with --role prefill and --api-key.",
                )
            if replica.is_up and place is not None:
                first = first or (replica, place)
                self._warn(replica, place)
        for replica in decoding.replicas:
            if replica.is_up:
                await self._check_decoding(replica, first)

    async def _check_decoding(self, replica: Replica, first: tuple[Replica, Place] | None) -> None:
        try:
            place = await read_place(getter(replica, self._settings), replica.address)
        except Unreachable as error:
            raise ConfigError(
                f"{replica.url} can't fetch blocks: {error.cause.rstrip('.')}.",
                "Give it --role decode and the --api-key that the router sends.",
            ) from None
        if place.role != "decode":
            raise ConfigError(
                f"{replica.url} has the role {place.role!r}; expected 'decode'.",
                "Start it with --role decode and --api-key, or leave --prefill out.",
            )
        if first is not None and place.fingerprint != first[1].fingerprint:
            raise ConfigError(
                f"{first[0].url} computes blocks of {first[1].fingerprint}, and {replica.url} "
                f"those of {place.fingerprint}: one can't use the other's.",
                "Serve the same model with the same Headrace, device and KV type on both.",
            )

    def _warn(self, replica: Replica, place: Place) -> None:
        assert place.peer is not None
        if place.peer.is_loopback and not is_loopback(replica.address.host):
            log.warning(
                "%s offers its blocks at %s, which only its own machine reaches: start it with "
                "--handover-host",
                replica.url,
                place.peer,
                extra={"event": "handover_loopback"},
            )

    # -- what is shown ---------------------------------------------------------------------------

    def lines(self) -> list[str]:
        return [
            f"prefill: {replica.url}  "
            + (f"out: {replica.why_out}" if replica.identity is None else replica.identity.shown)
            for replica in self.fleet.replicas
        ]

    def metrics(self) -> Iterator[str]:
        name = "headrace_router_prefill"
        yield f"# HELP {name}_requests_total Prompts that were to be computed by a replica."
        yield f"# TYPE {name}_requests_total counter"
        for replica in self.fleet.replicas:
            yield f'{name}_requests_total{{replica="{replica.url}"}} {self.sent[replica.url]}'
        yield f"# HELP {name}_left_total Prompts for which none was chosen, by reason."
        yield f"# TYPE {name}_left_total counter"
        for reason in ("short", "none"):
            yield f'{name}_left_total{{reason="{reason}"}} {self.left[reason]}'
        for what, words, value in _GAUGES:
            yield f"# HELP {name}_{what} {words}"
            yield f"# TYPE {name}_{what} gauge"
            for replica in self.fleet.replicas:
                yield f'{name}_{what}{{replica="{replica.url}"}} {value(replica)}'


_GAUGES: tuple[tuple[str, str, Callable[[Replica], int]], ...] = (
    ("up", "1: computes prompts.", lambda r: int(r.state == "up")),
    ("pending_tokens", "Of prompts under way, as estimated.", lambda r: r.pending_tokens),
)
