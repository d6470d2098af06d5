"""Who may ask, which version answers, what shadows get, and how replicas are found."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from typing import Any

import pytest
from tests.router import fakes
from tests.router.fakes import FakeReplica, ask, get, rig

from headrace.client.connection import parse_address
from headrace.core.errors import ConfigError
from headrace.router.run import check_start
from headrace.router.salt import Salts
from headrace.router.versions import Version
from headrace.server.access.keys import Keys
from headrace.server.access.limits import Key


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def key(name: str, **limits: Any) -> Key:
    return Key(name=name, digest=hashlib.sha256(name.encode()).digest(), **limits)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def versions_of(
    fakes_of: dict[str, FakeReplica], weights: dict[str, float], **more: Any
) -> list[Version]:
    found = []
    for name, fake in fakes_of.items():
        await fake.start()
        address = parse_address(fake.url)
        if name in more.get("shadows", {}):
            found.append(Version(name=name, addresses=(address,), shadow=more["shadows"][name]))
        else:
            users = frozenset(more.get("users", {}).get(name, ()))
            weight = weights[name]
            found.append(Version(name=name, addresses=(address,), weight=weight, users=users))
    return found


def test_keys_are_the_routers_and_replicas_get_theirs() -> None:
    async def main() -> None:
        replica = FakeReplica()
        keys = Keys([key("ann"), key("bob", requests_per_minute=1)])
        async with rig(replica, keys=keys, internal_key="inside", operator_key="ops") as r:
            assert (await ask(r.port)).status == 401
            assert (await ask(r.port, headers=bearer("eve"))).status == 401
            assert (await ask(r.port, headers=bearer("inside"))).status == 401
            assert (await get(r.port, "/v1/models")).status == 401
            assert (await get(r.port, "/health")).status == 200
            assert replica.got == []
            assert (await ask(r.port, headers=bearer("ann"))).status == 200
            assert replica.got[0].header("authorization") == "Bearer inside"
            assert (await ask(r.port, headers={"x-api-key": "ann"})).status == 200
            assert replica.got[1].header("x-api-key") == ""
            found = await ask(r.port, headers=bearer("bob"))
            assert found.headers["x-ratelimit-remaining-requests"] == "0"
            found = await ask(r.port, headers=bearer("bob"))
            assert (found.status, len(replica.got)) == (429, 3)
            assert int(found.headers["retry-after"]) > 1
            assert (await get(r.port, "/metrics", headers=bearer("ann"))).status == 401
            assert (await get(r.port, "/metrics", headers=bearer("ops"))).status == 200

    run(main())


def test_without_a_key_for_operators_no_client_is_one() -> None:
    async def main() -> None:
        async with rig(FakeReplica(), keys=Keys([key("ann")])) as r:
            assert (await get(r.port, "/metrics", headers=bearer("ann"))).status == 403

    run(main())


def test_limits_on_concurrency_and_tokens() -> None:
    async def main() -> None:
        replica = FakeReplica(behave=fakes.hang)
        keys = Keys([key("ann", max_concurrent=1), key("bob", tokens_per_minute=1000)])
        async with rig(replica, keys=keys) as r:
            first = asyncio.create_task(ask(r.port, headers=bearer("ann")))
            await replica.began.wait()
            assert (await ask(r.port, headers=bearer("ann"))).status == 429
            first.cancel()
            await r.settle()
            replica.behave = fakes.answer
            assert (await ask(r.port, headers=bearer("ann"))).status == 200
            body = {"messages": [], "max_tokens": 900}
            assert (await ask(r.port, body, headers=bearer("bob"))).status == 200
            assert (await ask(r.port, body, headers=bearer("bob"))).status == 429
            body["max_tokens"] = 5000
            assert (await ask(r.port, body, headers=bearer("bob"))).status == 400
            await r.settle()

    run(main())


def test_keys_share_no_prefix() -> None:
    async def main() -> None:
        replica = FakeReplica()
        async with rig(replica, keys=Keys([key("ann"), key("bob")])) as r:
            for name in ("ann", "bob", "ann"):
                body = {"messages": ["hi"], "n": 1}
                assert (await ask(r.port, body, headers=bearer(name))).status == 200
            ann, bob, again = (json.loads(got.body) for got in replica.got)
            assert ann == again
            assert ann["cache_salt"] != bob["cache_salt"]
            assert {**ann, "cache_salt": ""} == {**body, "cache_salt": ""}

    run(main())


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"a": "}"}', b'{"a":1, "cache_salt": "x"}'])
def test_a_salt_is_put_into_any_object(body: bytes) -> None:
    salts = Salts("inside")
    has_salt = b"cache_salt" in body
    found = json.loads(salts.salted(body, "ann", has_salt=has_salt))
    assert len(found.pop("cache_salt")) == 64
    wanted = json.loads(body)
    wanted.pop("cache_salt", None)
    assert found == wanted
    assert Salts("inside").salted(body, "ann", has_salt=has_salt) == salts.salted(
        body, "ann", has_salt=has_salt
    )


def test_versions_share_by_weight_and_by_user() -> None:
    async def main() -> None:
        replicas = {"old": FakeReplica("old", model="m"), "new": FakeReplica("new", model="m")}
        named = await versions_of(replicas, {"old": 3.0, "new": 1.0}, users={"new": ["vip"]})
        async with rig(versions=named) as r:
            check_start(r.fleet)
            found = Counter[str]()
            for _ in range(80):
                found[(await ask(r.port)).headers["x-headrace-version"]] += 1
            assert 40 <= found["old"] < 75
            users: dict[str, set[str]] = {}
            for number in range(30):
                name = f"user {number % 10}"
                answer = await ask(r.port, {"messages": [], "user": name})
                users.setdefault(name, set()).add(answer.headers["x-headrace-version"])
            assert all(len(each) == 1 for each in users.values())
            answer = await ask(r.port, {"messages": [], "user": "vip"})
            assert answer.headers["x-headrace-version"] == "new"
            # A version without replicas: the other answers.
            replicas["old"].kill()
            await r.heart.first()
            for _ in range(5):
                assert b"new" in (await ask(r.port)).body
        for fake in replicas.values():
            fake.kill()

    run(main())


def test_named_versions_may_differ_and_their_replicas_may_not() -> None:
    async def main() -> None:
        replicas = {"a": FakeReplica(fingerprint="hr-1"), "b": FakeReplica(fingerprint="hr-2")}
        named = await versions_of(replicas, {"a": 1.0, "b": 1.0})
        async with rig(versions=named) as r:
            check_start(r.fleet)
        one = Version(name="a", addresses=tuple(a for v in named for a in v.addresses))
        async with rig(versions=[one]) as r:
            with pytest.raises(ConfigError, match=r"hr-1.*hr-2"):
                check_start(r.fleet)
        for fake in replicas.values():
            fake.kill()

    run(main())


def test_a_shadow_gets_copies_and_delays_nobody() -> None:
    async def main() -> None:
        replicas = {"real": FakeReplica("real"), "next": FakeReplica("next", behave=fakes.hang)}
        named = await versions_of(replicas, {"real": 1.0}, shadows={"next": 1.0})
        async with rig(versions=named) as r:
            for number in range(3):
                found = await ask(r.port, {"messages": [number]})
                assert b"real" in found.body
            shadow = replicas["next"]
            while len(shadow.got) < 3:
                await asyncio.sleep(0.005)
            bodies = sorted(got.body for got in shadow.got)
            assert bodies == sorted(got.body for got in replicas["real"].got)
            shadow.behave = fakes.answer
            await ask(r.port)
            while r.router.counts.shadowed["next", "200"] < 1:
                await asyncio.sleep(0.005)
            shadow.behave = fakes.die_half_way
            lost = r.router.counts.shadowed["next", "lost"]
            await ask(r.port)
            while r.router.counts.shadowed["next", "lost"] == lost:
                await asyncio.sleep(0.005)
            # Nobody is sent to a shadow, not even when nothing else lives.
            replicas["real"].kill()
            await r.heart.first()
            assert (await ask(r.port)).status == 503
            r.router.shadows.stop()
            await asyncio.sleep(0)
        for fake in replicas.values():
            fake.kill()

    run(main())
