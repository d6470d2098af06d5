"""How two engines meet: who has the key, who has not, and shared memory that can't be trusted."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.handover.test_frames import wanted

from headrace.server.handover import session
from headrace.server.handover.frames import Cause, HandoverError, Kind
from headrace.server.handover.session import Peer, Wire, parse_peer, secret_of
from headrace.server.handover.shared import Slots

KEY, OTHER = secret_of("key"), secret_of("another")


def pair(family: int = socket.AF_UNIX) -> tuple[Wire, Wire]:
    if family == socket.AF_UNIX:
        one, two = socket.socketpair()
        return Wire(one), Wire(two)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return Wire(one), Wire(server.accept()[0])


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Runs it in a thread; calling the result waits, and returns or raises what it did."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def done() -> Any:
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return done


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_two_with_the_same_key(family: int) -> None:
    asker, giver = pair(family)
    answered = beside(lambda: session.answer(giver, KEY))
    session.ask(asker, session.greet(asker, KEY), wanted())
    assert answered() == (wanted(), None)
    asker.close()
    giver.close()


def test_a_giver_without_the_key_is_found_out_first() -> None:
    asker, giver = pair()
    answered = beside(lambda: session.answer(giver, OTHER))
    with pytest.raises(HandoverError) as caught:
        session.greet(asker, KEY)
    assert caught.value.cause is Cause.KEY
    asker.close()
    with pytest.raises(HandoverError):
        answered()
    giver.close()


def test_an_asker_without_the_key_gets_nothing() -> None:
    asker, giver = pair()
    answered = beside(lambda: session.answer(giver, KEY))
    asker.send(Kind.HELLO, bytes(32))
    asker.receive({Kind.WELCOME: 64})
    session.ask(asker, lambda packed: session._proof(OTHER, b"asker", packed), wanted())
    with pytest.raises(HandoverError) as caught:
        answered()
    assert caught.value.cause is Cause.KEY
    asker.close()
    giver.close()


def test_what_one_connection_proved_is_worth_nothing_in_another() -> None:
    """The giver's nonce is part of the proof: what was overheard can't be sent again."""
    asker, giver = pair()
    answered = beside(lambda: session.answer(giver, KEY))
    prove = session.greet(asker, KEY)
    session.ask(asker, prove, wanted())
    answered()
    again, giver_again = pair()
    answered = beside(lambda: session.answer(giver_again, KEY))
    again.send(Kind.HELLO, bytes(32))
    again.receive({Kind.WELCOME: 64})
    session.ask(again, prove, wanted())
    with pytest.raises(HandoverError) as caught:
        answered()
    assert caught.value.cause is Cause.KEY
    for wire in (asker, giver, again, giver_again):
        wire.close()


def test_shared_memory_goes_with_the_request() -> None:
    asker, giver = pair()
    slots = Slots.make(2, 100)
    answered = beside(lambda: session.answer(giver, KEY))
    session.ask(asker, session.greet(asker, KEY), wanted(slots=2), slots.descriptor)
    _, descriptor = answered()
    theirs = Slots.open(descriptor, 2, 100)
    with theirs.view(1, 5) as view:
        view[:] = b"hello"
    with slots.view(1, 5) as view:
        assert bytes(view) == b"hello"
    with pytest.raises(HandoverError, match="no such"):
        theirs.view(2, 1)
    with pytest.raises(HandoverError, match="no such"):
        theirs.view(0, 101)
    for each in (slots, theirs, asker, giver):
        each.close()


def test_memory_that_can_shrink_or_is_too_small_is_refused() -> None:
    for size, seals, why in ((4096, False, "smaller"), (10, True, "smaller than was said")):
        if seals:
            slots = Slots.make(1, size)
            descriptor = os.dup(slots.descriptor)
            slots.close()
        else:
            descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
        with pytest.raises(HandoverError, match=why):
            Slots.open(descriptor, 1, 4096)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)  # it was taken, and closed
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(HandoverError, match="can't be used"):
        Slots.open(read, 1, 4096)


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("127.0.0.1:9", Peer("127.0.0.1", 9)),
        ("[::1]:9", Peer("::1", 9)),
        ("host.example:65535", Peer("host.example", 65535)),
        ("", None),
        ("host", None),
        (":9", None),
        ("host:0", None),
        ("host:65536", None),
        ("host:9x", None),
        ("ho\nst:9", None),
        ("x" * 300 + ":9", None),
    ],
)
def test_where_a_peer_is(text: str, peer: Peer | None) -> None:
    assert parse_peer(text) == peer
    if peer is not None:
        assert parse_peer(str(peer)) == peer


def test_nobody_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with pytest.raises(HandoverError) as caught:
            session.connect(Peer("127.0.0.1", probe.getsockname()[1]))
    assert caught.value.cause is Cause.UNREACHABLE
