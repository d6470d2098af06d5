"""The router's fleet where versions come and go: during a rolling change there are two.

Each fingerprint is a version, its weight the number of its replicas. A session, or a prompt's
beginning, stays with a version while it can, and once it has moved to the new one it does not go
back. Knows replicas; no processes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from headrace.client.connection import Address
from headrace.policies.routing import Wanted, home_key
from headrace.router.asked import Asked
from headrace.router.fleet import Fleet, Group
from headrace.router.replica import Replica
from headrace.router.settings import RouterSettings
from headrace.router.versions import Version, pick

NONE = ""  # the version that never has a replica
_ONE = "replica "  # a version's name for one replica alone: "replica http://…"
FULL = 1.5  # a version with this many times the other replicas' mean load is passed by


class RollingFleet(Fleet):
    def __init__(self, settings: RouterSettings) -> None:
        super().__init__([Version(name=NONE, addresses=())], settings)

    # -- who is there ----------------------------------------------------------------------------

    def enter(self, fingerprint: str, address: Address) -> Replica:
        if fingerprint not in self.groups:
            self.groups[fingerprint] = Group(Version(name=fingerprint, addresses=()))
        replica = self.add(fingerprint, address)
        self._weigh()
        return replica

    def take_out(self, replica: Replica) -> None:
        """It takes no more requests; those that run go on."""
        self.remove(replica)
        self._weigh()

    def is_in(self, replica: Replica, fingerprint: str) -> bool:
        group = self.groups.get(fingerprint)
        return group is not None and replica.number in group.replicas

    def _weigh(self) -> None:
        for name, group in list(self.groups.items()):
            count = len(group.replicas)
            group.version = replace(group.version, weight=float(count))
            if not count and name != NONE:
                del self.groups[name]

    def one_at(self, url: str) -> str:
        """The name of a version that is this replica alone."""
        return _ONE + url

    # -- which one -------------------------------------------------------------------------------

    def version_for(self, asked: Asked, user: str | None) -> str:
        groups = [group for group in self.groups.values() if group.replicas]
        if len(groups) < 2:
            return groups[0].version.name if groups else NONE
        now_s = self._clock()
        live = [g for g in groups if any(r.takes(now_s) for r in g.replicas.values())] or groups
        named = [g for g in live if g.identity is not None and asked.model in g.identity.models]
        versions = [group.version for group in named or live]
        if user is None and asked.prefixes:
            user = f"prefix {home_key(asked.prefixes)}"
        chosen = pick(versions, user, self._random.random()).name
        # One beginning may be everybody's: then a version would get more than its share.
        loads = {version.name: self._load(version.name, asked) for version in versions}
        least = min(loads, key=lambda name: loads[name])
        return least if loads[chosen] > FULL * loads[least] else chosen

    def _load(self, name: str, asked: Asked) -> float:
        """Pending tokens of a replica, with three requests of this one's size for all."""
        replicas = self.groups[name].replicas.values()
        pending = sum(replica.pending_tokens for replica in replicas)
        return 3 * self.wanted(asked, None).counted().tokens + pending / len(replicas)

    def choose(
        self, wanted: Wanted, version: str, tried: Collection[int] = (), *, strict: bool = False
    ) -> Replica | None:
        if version.startswith(_ONE):
            replica = self.find(version.removeprefix(_ONE))
            is_there = replica is not None and replica.is_member and replica.number not in tried
            return replica if is_there else None
        # A version may have ended since it was chosen.
        known = version if version in self.groups else NONE
        return super().choose(wanted, known, tried, strict=strict)
