"""Versions that come and go: who gets which during a rolling change."""

from __future__ import annotations

import json
from collections import Counter

from headrace.client.connection import parse_address
from headrace.replicas.fleet import RollingFleet
from headrace.router.asked import Asked, read_asked
from headrace.router.replica import Identity, Replica
from headrace.router.settings import RouterSettings


def ask(text: str, model: str = "m") -> Asked:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return read_asked(json.dumps(body).encode(), 1024)


class Rolling:
    """Four replicas that become new one after the other."""

    def __init__(self, old_models: tuple[str, ...] = ("m",), new_models: tuple[str, ...] = ("m",)):
        self.fleet = RollingFleet(RouterSettings())
        self._models = {"hr-old": old_models, "hr-new": new_models}
        self.members = [self.enter("hr-old", number) for number in range(4)]

    def enter(self, fingerprint: str, number: int) -> Replica:
        replica = self.fleet.enter(fingerprint, parse_address(f"http://127.0.0.1:{9000 + number}"))
        replica.came_up()
        identity = Identity(
            fingerprint=fingerprint, models=self._models[fingerprint], is_headrace=True
        )
        self.fleet.group_of(replica).admit(replica, identity)
        assert replica.is_member
        return replica

    def roll(self, number: int) -> None:
        self.fleet.take_out(self.members[number])
        self.members[number] = self.enter("hr-new", number)

    def share_of_new(self) -> float:
        found = Counter(self.fleet.version_for(ask(f"prompt {n}"), None) for n in range(2000))
        return found["hr-new"] / 2000


def test_no_version_and_one() -> None:
    empty = RollingFleet(RouterSettings())
    asked = ask("x")
    assert empty.version_for(asked, None) == ""
    assert empty.choose(empty.wanted(asked, None), "") is None
    assert not empty.takes_requests()
    rolling = Rolling()
    assert rolling.fleet.version_for(asked, None) == "hr-old"
    assert rolling.fleet.takes_requests()


def test_the_new_version_gets_its_share() -> None:
    rolling = Rolling()
    shares = []
    for number in range(4):
        rolling.roll(number)
        shares.append(rolling.share_of_new())
    assert shares[3] == 1.0
    for share, wanted in zip(shares, (0.25, 0.5, 0.75), strict=False):
        assert abs(share - wanted) < 0.06
    assert set(rolling.fleet.groups) == {"", "hr-new"}


def test_a_session_and_a_beginning_never_go_back() -> None:
    rolling = Rolling()
    names = {f"ann {n}": ask(f"prompt {n}") for n in range(200)}
    seen: dict[str, list[str]] = {name: [] for name in names}
    for number in range(4):
        rolling.roll(number)
        for name, asked in names.items():
            seen[name].append(rolling.fleet.version_for(asked, name))
            seen[name].append(rolling.fleet.version_for(asked, name))
    for versions in seen.values():
        assert versions == sorted(versions, reverse=True)  # hr-old, then hr-new


def test_everybodys_beginning_does_not_fill_one_version() -> None:
    rolling = Rolling()
    rolling.roll(0)
    asked = next(
        a for n in range(99) if rolling.fleet.version_for(a := ask(f"{n}"), None) == "hr-new"
    )
    new = rolling.members[0]
    sent = Counter[str]()
    for _ in range(40):
        version = rolling.fleet.version_for(asked, None)
        wanted = rolling.fleet.wanted(asked, None)
        replica = rolling.fleet.choose(wanted, version)
        assert replica is not None
        rolling.fleet.send(replica, wanted)
        sent[version] += 1
    assert sent["hr-old"] > sent["hr-new"]
    assert new.running <= 20


def test_a_name_that_one_version_has_goes_there() -> None:
    rolling = Rolling(old_models=("old",), new_models=("new", "old"))
    rolling.roll(0)
    assert {rolling.fleet.version_for(ask(f"{n}", "new"), None) for n in range(50)} == {"hr-new"}
    assert len({rolling.fleet.version_for(ask(f"{n}", "old"), None) for n in range(50)}) == 2


def test_a_version_that_ended_meanwhile_is_no_error() -> None:
    rolling = Rolling()
    for number in range(4):
        rolling.roll(number)
    asked = ask("x")
    found = rolling.fleet.choose(rolling.fleet.wanted(asked, None), "hr-old")
    assert found in rolling.members


def test_one_replica_alone() -> None:
    rolling = Rolling()
    wanted = rolling.fleet.wanted(ask("x"), None)
    one = rolling.members[2]
    name = rolling.fleet.one_at(one.url)
    assert rolling.fleet.choose(wanted, name) is one
    assert rolling.fleet.choose(wanted, name, {one.number}) is None
    one.went_out("gone")
    assert rolling.fleet.choose(wanted, name) is None
