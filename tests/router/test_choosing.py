"""Which replica a request goes to, by its body: the same beginning, the same session, the least."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.client.connection import parse_address
from headrace.policies.routing import Routing
from headrace.router.asked import LIKELY_TOKENS, Asked, read_asked
from headrace.router.fleet import Fleet
from headrace.router.replica import Identity, Replica
from headrace.router.settings import RouterSettings
from headrace.router.versions import Version


def fleet(count: int, routing: Routing, **settings: Any) -> Fleet:
    addresses = tuple(parse_address(f"http://r{n}:8000") for n in range(count))
    found = Fleet(
        [Version(name="", addresses=addresses)],
        RouterSettings(routing=routing, **settings),
        clock=lambda: 0.0,
        random=Random(1),
    )
    for replica in found.replicas:
        replica.is_up = True
    return found


def chat(text: str, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def choose(fleet: Fleet, body: bytes, session: str | None = None) -> Replica:
    """For a request that is sent there, and has ended."""
    wanted = fleet.wanted(read_asked(body, 4096), session)
    found = fleet.choose(wanted, "")
    assert found is not None
    found.ended(fleet.send(found, wanted).tokens)
    return found


def test_what_a_body_says() -> None:
    found = read_asked(chat("x" * 400, max_tokens=50, n=2, user="ann", model="m"), 1024)
    assert (found.user, found.model, found.output_tokens) == ("ann", "m", 50)
    assert found.likely_tokens == 100
    assert 100 < found.prompt_tokens < 160
    for odd in (b"", b"[]", b"{", b'{"messages": 3}', b"\xff", b'{"n": 99999999}'):
        assert read_asked(odd, 1024).likely_tokens == LIKELY_TOKENS
    allowed = read_asked(chat("x", max_tokens=8000), 1024)
    assert (allowed.output_tokens, allowed.likely_tokens) == (8000, LIKELY_TOKENS)
    tokens = b'{"prompt": [%b]}' % b", ".join(b"%d" % number for number in range(200))
    assert read_asked(tokens, 1024).prefixes


def test_beginnings_are_the_same_as_far_as_prompts_are() -> None:
    long = "s" * 2000
    one, two = (read_asked(chat(long + end + "x" * 500), 4096).prefixes for end in "ab")
    assert [tokens for _, tokens in one] == [64, 128, 192, 256, 320, 400, 500, 625]
    assert [a == b for a, b in zip(one, two, strict=True)] == [True] * 7 + [False]
    assert read_asked(chat(long + "a"), 1024).prefixes == one[:4]
    for other in (chat("t" + long), chat(long, model="other"), chat(long, tools=[{"a": 1}])):
        assert not set(read_asked(other, 4096).prefixes) & set(one)


@given(st.binary(max_size=200))
def test_any_body_is_read(body: bytes) -> None:
    found = read_asked(body, 64)
    assert min(found.prompt_tokens, found.likely_tokens) > 0


def test_a_known_beginning_goes_where_it_was() -> None:
    several = fleet(4, Routing.PREFIX)
    body = chat("p" * 2000)
    homes = {choose(several, body).url for _ in range(20)}
    assert len(homes) == 1
    home = choose(several, body)
    home.began(900)  # less than to compute 500 tokens anew
    assert choose(several, body) is home
    home.began(100_000)
    assert choose(several, body) is not home
    assert choose(several, body) is not home  # and has it now, too


def test_what_a_replica_had_cached_is_gone_when_it_was_out() -> None:
    several = fleet(2, Routing.PREFIX)
    body = chat("p" * 2000)
    home = choose(several, body)
    home.began(900)
    assert choose(several, body) is home
    home.went_out("test")
    home.came_up()
    assert choose(several, body) is not home


def test_a_replica_tells_how_much_it_can_hold() -> None:
    several = fleet(1, Routing.PREFIX)
    (replica,) = several.replicas
    replica.load = {"cache_tokens": 700}
    bodies = [chat(letter * 2000, max_tokens=10) for letter in "ab"]
    for body in bodies:
        choose(several, body)
    keys = [read_asked(body, 4096).prefixes[-1][0] for body in bodies]
    assert [bool(several.caches.holders(key)) for key in keys] == [False, True]


def test_a_session_stays_with_its_replica() -> None:
    several = fleet(4, Routing.SESSION)
    homes = {choose(several, chat(f"{n}"), "session").url for n in range(20)}
    assert len(homes) == 1
    assert len({choose(several, chat("x"), f"s{n}").url for n in range(40)}) == 4


def test_least_pending_counts_what_was_sent() -> None:
    several = fleet(3, Routing.LEAST_PENDING)
    found = Counter[str]()
    for n in range(30):
        replica = choose(several, chat(f"{n}", max_tokens=10))
        replica.began(100)
        found[replica.url] += 1
    assert set(found.values()) == {10}


def test_ties_are_broken_at_random() -> None:
    several = fleet(3, Routing.LEAST_PENDING)
    found = Counter(choose(several, chat(f"{n}")).url for n in range(300))
    assert min(found.values()) > 50


def test_numbers_are_the_same_in_every_router() -> None:
    one, two = fleet(3, Routing.PREFIX), fleet(3, Routing.PREFIX)
    assert [r.number for r in one.replicas] == [r.number for r in two.replicas]


def test_a_model_is_asked_where_it_is() -> None:
    urls = [parse_address(f"http://r{n}:8000") for n in range(2)]
    versions = [
        Version(name="a", addresses=(urls[0],), weight=99),
        Version(name="b", addresses=(urls[1],), weight=1),
    ]
    both = Fleet(versions, RouterSettings(), clock=lambda: 0.0, random=Random(1))
    for replica, model in zip(both.replicas, ("m1", "m2"), strict=True):
        replica.came_up()
        both.group_of(replica).admit(replica, Identity(fingerprint=model, models=(model,)))
    assert {both.version_for(Asked(model="m2"), None) for _ in range(50)} == {"b"}
    assert {both.version_for(Asked(model="m1"), None) for _ in range(50)} == {"a"}
    # Without replicas a version gets nothing.
    next(iter(both.replicas)).went_out("test")
    assert {both.version_for(Asked(model="m1"), None) for _ in range(50)} == {"b"}
