"""All replicas, by version, and the choice of one for a request: policies/ decides.

Also which replicas belong together: those of one version must serve the same thing. Knows replicas
and policies; no clients and no bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from random import Random

from headrace.client.connection import Address
from headrace.core.errors import ConfigError
from headrace.policies.prefixes import Caches
from headrace.policies.routing import Counted, Rings, Routing, Wanted, route
from headrace.router.asked import Asked, session_key
from headrace.router.replica import Identity, Replica
from headrace.router.settings import RouterSettings
from headrace.router.versions import Version, pick

# Tokens are estimated from bytes, and most prompts have fewer. A belief that ends early costs as
# much as one that lasts too long.
ROOM = 1.25

log = logging.getLogger(__name__)


class Group:
    """The replicas of one version."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.replicas: dict[int, Replica] = {}
        self.identity: Identity | None = None  # of the first that was seen

    def admit(self, replica: Replica, identity: Identity) -> None:
        """Decides whether it belongs here, by what it serves."""
        others = [r for r in self.replicas.values() if r is not replica and r.is_up]
        if self.identity is None or not any(not r.kept_out for r in others):
            self.identity = identity  # nobody else answers: this is what the version is now
        replica.identity = identity
        before, replica.kept_out = replica.kept_out, self.difference(identity)
        if replica.kept_out and not before:
            log.warning(
                "%s is kept out: %s", replica.url, replica.kept_out, extra={"event": "kept_out"}
            )

    def difference(self, identity: Identity) -> str:
        """From what the version serves; empty: none."""
        mine = self.identity
        if mine is None or mine == identity:
            return ""
        if mine.models != identity.models:
            return f"it serves {identity.shown}, the others serve {mine.shown}"
        return f"its fingerprint is {identity.fingerprint}, that of the others {mine.fingerprint}"


class Fleet:
    def __init__(
        self,
        versions: Sequence[Version],
        settings: RouterSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._random = random or Random()
        self.caches = Caches(settings.cache_tokens)
        self._rings = Rings()
        self._turn = 0
        self.groups = {version.name: Group(version) for version in versions}
        self.has_shadows = any(version.shadow is not None for version in versions)
        for version in versions:
            for address in version.addresses:
                self.add(version.name, address)

    # -- who is there ----------------------------------------------------------------------------

    @property
    def replicas(self) -> Iterator[Replica]:
        for group in self.groups.values():
            yield from group.replicas.values()

    def group_of(self, replica: Replica) -> Group:
        return next(g for g in self.groups.values() if replica.number in g.replicas)

    def find(self, url: str) -> Replica | None:
        return next((r for r in self.replicas if r.url == url), None)

    def add(self, version: str, address: Address) -> Replica:
        replica = Replica(address, clock=self._clock)
        replica.on_out = lambda: self.caches.forget(replica.number)
        self.groups[version].replicas[replica.number] = replica
        return replica

    def remove(self, replica: Replica) -> None:
        """It takes no more requests; those that run go on."""
        replica.is_draining = True
        replica.close_free()
        self.caches.forget(replica.number)
        del self.group_of(replica).replicas[replica.number]

    def takes_requests(self) -> bool:
        return any(r.is_member for g in self._answering() for r in g.replicas.values())

    def _answering(self) -> list[Group]:
        return [group for group in self.groups.values() if group.version.shadow is None]

    def check_mixed(self) -> None:
        """At start: raises where replicas of one version serve different things."""
        for group in self.groups.values():
            found = [r for r in group.replicas.values() if r.identity is not None]
            for replica in found[1:]:
                first = found[0]
                assert first.identity is not None
                if replica.identity == first.identity:
                    continue
                assert replica.identity is not None
                raise ConfigError(
                    f"{first.url} serves {first.identity.shown}, and {replica.url} serves "
                    f"{replica.identity.shown}.",
                    "Name them as versions: --version a=URL:1 --version b=URL:1.",
                )

    # -- which one -------------------------------------------------------------------------------

    def version_for(self, asked: Asked, user: str | None) -> str:
        """The version for a request: one that has the model, by user or by weight."""
        groups = self._answering()
        if len(groups) == 1:
            return groups[0].version.name
        now_s = self._clock()
        live = [g for g in groups if any(r.takes(now_s) for r in g.replicas.values())] or groups
        named = [g for g in live if g.identity is not None and asked.model in g.identity.models]
        versions = [group.version for group in named or live]
        return pick(versions, user, self._random.random()).name

    def shadows_for(self) -> list[str]:
        """The shadows that get a copy of this request."""
        return [
            group.version.name
            for group in self.groups.values()
            if group.version.shadow is not None and self._random.random() < group.version.shadow
        ]

    def wanted(self, asked: Asked, session: str | None) -> Wanted:
        return Wanted(
            prompt_tokens=asked.prompt_tokens,
            answer_tokens=asked.likely_tokens,
            prefixes=asked.prefixes,
            session=None if session is None else session_key(session),
        )

    def taking(self, number: int) -> Replica | None:
        """That one, if it takes requests and answers clients."""
        found = (group.replicas.get(number) for group in self._answering())
        replica = next((each for each in found if each is not None), None)
        return replica if replica is not None and replica.takes(self._clock()) else None

    def choose(
        self, wanted: Wanted, version: str, tried: Collection[int] = (), *, strict: bool = False
    ) -> Replica | None:
        """A replica of the version; if it has none left, of another, unless `strict`. One whose
        heartbeat is late is taken where there is no other of its version. Where all circuits are
        open, they are ignored: a client whose requests make servers fail must not shut out
        everybody else."""
        now_s = self._clock()
        groups = [self.groups[version]]
        if not strict:
            groups += [g for g in self._answering() if g.version.name != version]
        for group in groups:
            taking = [r for n, r in group.replicas.items() if r.takes(now_s) and n not in tried]
            if taking:
                prompt = [replica for replica in taking if not replica.is_late] or taking
                numbers = tuple(replica.number for replica in prompt)
                return group.replicas[self._route(wanted, numbers, group)]
        for group in groups:
            numbers = tuple(n for n, r in group.replicas.items() if r.is_member and n not in tried)
            if numbers:
                return group.replicas[self._route(wanted, numbers, group)]
        return None

    def _route(self, wanted: Wanted, numbers: tuple[int, ...], group: Group) -> int:
        chosen = numbers[0]
        if len(numbers) > 1:
            self._turn += 1
            chosen = route(
                self._settings.routing,
                wanted,
                ring=self._rings.of(numbers),
                pending={n: group.replicas[n].pending_tokens for n in numbers},
                caches=self.caches,
                turn=self._turn,
                tie=self._random.random(),
                bound=self._settings.bound,
            )
        return chosen

    def send(self, replica: Replica, wanted: Wanted) -> Counted:
        """The request goes there: from now on it is pending, and believed to be cached."""
        number = replica.number
        counted = wanted.counted(self.caches.held_tokens(number, wanted.prefixes))
        if self._settings.routing is Routing.PREFIX:
            room = replica.load.get("cache_tokens")
            if isinstance(room, int) and room > 0:
                self.caches.set_room(number, int(ROOM * room))
            self.caches.sent(number, wanted.prefixes, wanted.tokens)
        replica.began(counted.tokens)
        return counted
