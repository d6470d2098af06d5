"""Who has a place when there are more connections than places."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.server.edge_server import EdgeServer
from tests.server.raw_client import RawClient, post

from headrace.server.edge.room import DROPS, GRACE_S, STALLED_S, Phase, Room

GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
GET_WAIT = b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Member:
    def __init__(self, room: Room) -> None:
        self.is_dropped = self.has_unread = False
        self._room = room
        self.has_place = room.enter(self)

    def move(self, phase: Phase) -> Member:
        self._room.move(self, phase)
        return self

    def abort(self) -> None:
        self.is_dropped = True


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(clock: Clock) -> Room:
    return Room(3, 2, clock=clock)


def test_the_oldest_that_says_nothing_goes_first(room: Room, clock: Clock) -> None:
    members = []
    for _ in range(3):
        members.append(Member(room))
        clock.now_s += GRACE_S
    members.append(Member(room))
    assert [member.is_dropped for member in members] == [True, False, False, False]
    assert room.dropped == {"evicted_silent": 1}


def test_one_that_just_came_outlives_those_between_requests(room: Room) -> None:
    """Its first bytes are on their way; the others have had their answer."""
    fresh = Member(room)
    idle = [Member(room).move(Phase.BUSY).move(Phase.IDLE) for _ in range(2)]
    assert [Member(room).has_place, Member(room).has_place] == [True, True]
    assert all(member.is_dropped for member in idle)
    assert not fresh.is_dropped
    Member(room)
    assert fresh.is_dropped  # now there is nobody else


@pytest.mark.parametrize("phase", [Phase.BUSY, Phase.BODY])
def test_who_is_served_stays_and_newcomers_get_spare_places(room: Room, phase: Phase) -> None:
    served = [Member(room).move(phase) for _ in range(3)]
    spare = [Member(room) for _ in range(4)]
    assert [member.is_dropped for member in spare] == [True, True, False, False]
    assert [room.is_spare(member) for member in spare] == [False, False, True, True]
    assert not any(member.is_dropped or not member.has_place for member in served)
    room.leave(served[0])
    assert Member(room).has_place
    assert room.dropped == {"evicted_spare": 2}


def test_a_body_that_stalled_loses_its_place_and_one_that_goes_on_does_not(
    room: Room, clock: Clock
) -> None:
    bodies = [Member(room).move(Phase.BODY) for _ in range(3)]
    clock.now_s += STALLED_S
    bodies[0].move(Phase.BODY)  # a byte came
    assert Member(room).move(Phase.BUSY).has_place
    assert Member(room).move(Phase.BUSY).has_place
    assert not Member(room).has_place
    assert [member.is_dropped for member in bodies] == [False, True, True]


def test_an_answer_that_is_not_read_yet_is_not_cut_short(room: Room, clock: Clock) -> None:
    members = [Member(room).move(Phase.BUSY).move(Phase.IDLE) for _ in range(3)]
    members[0].has_unread = members[2].has_unread = True
    assert Member(room).move(Phase.BUSY).has_place
    assert not Member(room).has_place
    assert [member.is_dropped for member in members] == [False, True, False]
    clock.now_s += STALLED_S
    assert Member(room).has_place


def test_whoever_left_is_not_dropped(room: Room) -> None:
    gone = Member(room)
    room.leave(gone)
    for _ in range(5):
        Member(room)
    assert not gone.is_dropped
    gone.move(Phase.BUSY)  # too late: it means nothing
    assert len(room) == 3


def test_every_reason_is_known_beforehand() -> None:
    assert {f"evicted_{phase}" for phase in Phase} - set(DROPS) == {"evicted_busy"}


# -- over sockets ----------------------------------------------------------------------------------


@pytest.fixture(params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[EdgeServer]:
    with EdgeServer(request.param, max_connections=4, max_spare=3) as running:
        yield running


def test_health_answers_beside_any_number_of_silent_connections(server: EdgeServer) -> None:
    with ExitStack() as stack:
        for number in range(100):
            client = stack.enter_context(RawClient(server.port))
            if number % 2:
                client.send(b"GET /health HTTP/1.1\r\nx: ")
            if number % 10 == 0:
                with RawClient(server.port) as probe:
                    assert probe.send(GET_HEALTH).answer().status == 200
        assert len(server.room) <= 4
    dropped = server.service.dropped
    assert dropped["evicted_silent"] + dropped["evicted_headers"] > 80


def test_a_server_full_of_answers_tells_others_so_and_answers_probes(server: EdgeServer) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(RawClient(server.port)).send(GET_WAIT) for _ in range(4)]
        for _ in busy:
            assert server.waiting.acquire(timeout=60)
        for _ in range(20):
            with RawClient(server.port) as probe:
                answer = probe.send(GET_HEALTH).answer()
                assert (answer.status, answer.headers["connection"]) == (200, "close")
                assert probe.is_closed()
            with RawClient(server.port) as other:
                answer = other.send(post("/echo", "x" * 100)).answer()
                assert answer.status == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert "4 connections" in answer.error["message"]
                assert other.is_closed()
        with RawClient(server.port) as silent:  # told after a while, without having asked
            assert silent.answer().status == 503
        server.let_go()
        assert [client.answer().status for client in busy] == [200] * 4
    assert server.service.dropped["full"] == 21


def test_a_flood_of_spare_connections_leaves_room_for_a_probe(server: EdgeServer) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(RawClient(server.port)).send(GET_WAIT)
            assert server.waiting.acquire(timeout=60)
        for _ in range(50):
            stack.enter_context(RawClient(server.port))
        with RawClient(server.port) as probe:
            assert probe.send(GET_HEALTH).answer().status == 200
        assert len(server.room) <= 4 + 3
    assert server.service.dropped["evicted_spare"] >= 40


def test_evicted_connections_are_gone_for_good(server: EdgeServer) -> None:
    """Their descriptors are closed, and the client hears of it."""
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.port)) for _ in range(40)]
        with RawClient(server.port) as probe:
            assert probe.send(GET_HEALTH).answer().status == 200
        assert all(client.is_closed() for client in clients[:36])


# -- clients that shut down one side, or both ------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_half_closes_after_its_request_gets_its_answer(
    server: EdgeServer, version: str
) -> None:
    with RawClient(server.port) as client:
        client.send(post("/wait", "x" * 10).replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        client.socket.shutdown(socket.SHUT_WR)
        assert server.waiting.acquire(timeout=60)
        time.sleep(0.2)  # so that it is looked for
        server.let_go()
        answer = client.answer()
        assert (answer.status, answer.body) == (200, b'{"length":10}')
        assert client.is_closed()
    assert not server.cancelled.is_set()


def test_a_stream_goes_on_after_a_half_close(server: EdgeServer) -> None:
    with RawClient(server.port) as client:
        client.send(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert server.waiting.acquire(timeout=60)
        client.socket.shutdown(socket.SHUT_WR)
        time.sleep(0.2)
        server.let_go()
        assert client.answer().body == b"data: 1\n\ndata: 2\n\n"
        assert client.is_closed()


def test_pipelined_requests_are_answered_after_a_half_close_but_for_half_a_one(
    server: EdgeServer,
) -> None:
    with RawClient(server.port) as client:
        client.send(GET_WAIT + GET_HEALTH + post("/echo", "x" * 10)[:-5])
        client.socket.shutdown(socket.SHUT_WR)
        assert server.waiting.acquire(timeout=60)
        server.let_go()
        assert [client.answer().status for _ in range(2)] == [200, 200]
        assert client.is_closed()


def test_a_client_that_half_closes_in_its_body_is_gone(server: EdgeServer) -> None:
    with RawClient(server.port) as client:
        client.send(post("/wait", "x" * 10)[:-5])
        client.socket.shutdown(socket.SHUT_WR)
        assert client.is_closed()
    assert not server.waiting.acquire(blocking=False)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_went_away_is_told_from_one_that_half_closed(
    server: EdgeServer, is_reset: bool
) -> None:
    with RawClient(server.port) as client:
        client.send(GET_WAIT)
        assert server.waiting.acquire(timeout=60)
        if is_reset:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.cancelled.wait(60)
