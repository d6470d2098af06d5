"""HTTP itself, over real sockets: what is odd but allowed works, what is wrong is refused alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from tests.server.conftest import RunningServer
from tests.server.raw_client import CHAT, GOOD, RawClient, check_good, post

GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def _still_good(strict: RunningServer) -> Iterator[None]:
    yield
    check_good(strict.port)
    assert "Traceback" not in strict.log


# -- allowed ---------------------------------------------------------------------------------------


def test_chunked_body(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for piece in (GOOD[:5], GOOD[5:]):
            client.send(f"{len(piece):x};ext=1\r\n{piece}\r\n")
        client.send("0\r\ntrailer: 1\r\n\r\n")
        assert client.answer().status == 200
        assert client.send(GET_HEALTH).answer().status == 200


def test_expect_100_continue(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        head, _, body = post(CHAT, GOOD, "expect: 100-continue").partition(b"\r\n\r\n")
        client.send(head, b"\r\n\r\n")
        expected = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert client.socket.recv(len(expected)) == expected
        assert client.send(body).answer().status == 200


def test_expect_with_too_large_a_body_is_refused_before_it_is_sent(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 70000\r\n"
            "expect: 100-continue\r\n\r\n"
        )
        answer = client.answer()
        assert answer.status == 413
        assert "70000" in answer.error["message"]
        assert "65536" in answer.error["message"]
        assert answer.headers["connection"] == "close"


def test_head_has_the_headers_and_no_body(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n").answer("HEAD")
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
        assert client.send(GET_HEALTH).answer().status == 200


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "GET"])
def test_wrong_method_says_what_is_allowed(strict: RunningServer, method: str) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(f"{method} {CHAT} HTTP/1.1\r\nhost: localhost\r\n\r\n").answer()
        assert answer.status == 405
        assert answer.headers["allow"] == "POST"
        assert answer.error["type"] == "invalid_request_error"
        assert client.send(GET_HEALTH).answer().status == 200


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("/v1/chat/completions/", "Did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/health/", "Did you mean /health?"),
        ("/elsewhere", "/openapi.json"),
        ("/%00%ff", "/openapi.json"),
        ("*", "/openapi.json"),
    ],
)
def test_wrong_path_is_404_with_a_hint(strict: RunningServer, target: str, hint: str) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n").answer()
        assert answer.status == 404
        assert hint in answer.error["message"]


@pytest.mark.parametrize(
    "target", ["/health", "/%68ealth", "http://example.org/health", "/health?x=1#y"]
)
def test_targets_that_mean_the_same(strict: RunningServer, target: str) -> None:
    with RawClient(strict.port) as client:
        assert (
            client.send(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n").answer().status == 200
        )


def test_http_1_0_gets_no_chunks(strict: RunningServer) -> None:
    body = json.dumps({**json.loads(GOOD), "stream": True})
    with RawClient(strict.port) as client:
        answer = client.send(post(CHAT, body).replace(b"HTTP/1.1", b"HTTP/1.0")).answer()
        assert answer.status == 200
        assert "transfer-encoding" not in answer.headers
        assert answer.body.startswith(b"data: {")
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert client.is_closed()


def test_pipelined_requests_are_answered_in_order(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(post(CHAT, GOOD) + GET_HEALTH + post("/health", "{}") + GET_HEALTH)
        assert "choices" in json.loads(client.answer().body)
        assert [client.answer().status for _ in range(3)] == [200, 405, 200]


def test_too_many_pipelined_requests_end_the_connection(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(post(CHAT, GOOD) + GET_HEALTH * 500)
        assert client.answer().status == 200
        assert client.is_closed()


def test_an_upgrade_to_http_2_is_ignored_and_its_body_read(strict: RunningServer) -> None:
    upgrade = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")
    with RawClient(strict.port) as client:
        request = post(CHAT, GOOD, *upgrade)
        client.send(request[:-10])
        time.sleep(0.05)  # so that the body comes in two
        assert client.send(request[-10:]).answer().status == 200
        assert client.send(request + GET_HEALTH).answer().status == 200
        assert client.answer().status == 200


def test_a_request_one_byte_at_a_time(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        for byte in post("/v1/chat/completions", '{"messages":1}'):
            client.send(bytes([byte]))
        assert client.answer().error["param"] == "messages"


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), "TLS"),
        (b"hello?\r\n\r\n", "not HTTP/1.1"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", "not HTTP/1.1"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", "not HTTP/1.1"),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\n", "not HTTP/1.1"),
        (
            b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc",
            "not HTTP/1.1",
        ),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", "not HTTP/1.1"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "not HTTP/1.1"),
    ],
)
def test_what_is_not_http_is_refused_in_openais_shape(
    strict: RunningServer, data: bytes, says: str
) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(data).answer()
        assert answer.status == 400
        assert says in answer.error["message"]
        assert client.is_closed()


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (b"host: localhost\r\nhost: localhost\r\n", "2 Host headers"),
        (b"host: a\r\nx: y\r\nHost: b\r\n", "2 Host headers"),
        (b"", "no Host header"),
        (b"host: a b\r\n", "neither a name nor an address"),
        (b"host: user@a\r\n", "neither a name nor an address"),
    ],
)
def test_there_is_one_sound_host(strict: RunningServer, hosts: bytes, says: str) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n").answer()
        assert answer.status == 400
        assert says in answer.error["message"]
        assert client.is_closed()


@pytest.mark.parametrize("host", ["", "a", "a:1", "[::1]:80", "a.b-c_d.example:8000"])
def test_hosts_that_are_sound(strict: RunningServer, host: str) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(f"GET /health HTTP/1.1\r\nhost: {host}\r\n\r\n").answer()
        assert answer.status == 200


def test_http_1_0_needs_no_host(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        assert client.send(b"GET /health HTTP/1.0\r\n\r\n").answer().status == 200


@pytest.mark.parametrize("upgrade", ["", "connection: upgrade\r\nupgrade: h2c\r\n"])
def test_a_length_with_thousands_of_zeros_before_it(short: RunningServer, upgrade: str) -> None:
    """It is a number all the same; Python's own int() takes no more than 4,300 digits."""
    with RawClient(short.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{upgrade}"
            f"content-length: {len(GOOD):05000}\r\n\r\n{GOOD}"
        )
        assert client.answer().status == 200


def test_broken_chunks(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        client.send('5\r\n{"a":\r\nzz\r\n')
        answer = client.answer()
        assert answer.status == 400
        assert "body is malformed" in answer.error["message"]
        assert client.is_closed()


def test_garbage_after_a_request_does_not_spoil_its_answer(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(post(CHAT, GOOD) + b"\x00garbage\r\n\r\n").answer()
        assert answer.status == 200
        assert json.loads(answer.body)["choices"]
        assert client.is_closed()


@pytest.mark.parametrize("in_one", [True, False])
def test_headers_are_bounded(strict: RunningServer, in_one: bool) -> None:
    lines = [b"x: " + b"y" * 5000] if in_one else [b"x-%d: " % i + b"y" * 50 for i in range(100)]
    with RawClient(strict.port) as client:
        answer = client.send(b"GET /health HTTP/1.1\r\n", b"\r\n".join(lines)).answer()
        assert answer.status == 431
        assert "4096" in answer.error["message"]
        assert client.is_closed()


def test_lines_of_headers_are_bounded(strict: RunningServer) -> None:
    """Each is an object or three: 32 KiB of them were more than a megabyte."""
    with RawClient(strict.port) as client:
        answer = client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * 300).answer()
        assert answer.status == 431
        assert "256 lines" in answer.error["message"]
        assert client.is_closed()


def test_a_body_in_chunks_of_a_byte(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for byte in GOOD:  # a small one may come as it likes
            client.send(f"1\r\n{byte}\r\n")
        assert client.send("0\r\n\r\n").answer().status == 200
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        answer = client.send("1\r\n \r\n" * 20_000).answer()
        assert answer.status == 400
        assert "chunks of a few bytes" in answer.error["message"]


def test_many_requests_on_one_connection_do_not_add_up_to_large_headers(
    strict: RunningServer,
) -> None:
    with RawClient(strict.port) as client:
        for _ in range(300):
            assert client.send(GET_HEALTH).answer().status == 200


def test_headers_after_a_chunked_body_are_bounded(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        client.send("2\r\n{}\r\n0\r\n")
        time.sleep(0.05)
        client.send(b"x: " + b"y" * 10000)
        assert client.answer().status == 431


def test_too_large_a_body_by_its_length(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(post(CHAT, "x" * 200_000)).answer()
        assert answer.status == 413
        assert "200000" in answer.error["message"]
        assert client.is_closed()


def test_too_large_a_body_in_chunks(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        client.send(*["1000\r\n" + "x" * 4096 + "\r\n"] * 20)
        assert client.answer().status == 413
        assert client.is_closed()


def test_a_length_that_no_body_can_have(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {10**15}\r\n\r\n")
        assert client.answer().status == 413


# -- slow ------------------------------------------------------------------------------------------


def test_a_silent_connection_is_closed(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        assert client.is_closed()


@pytest.mark.parametrize("between", [b"", GET_HEALTH])
def test_slow_headers_are_cut_off(strict: RunningServer, between: bytes) -> None:
    """Also the second request's, and however steadily they trickle."""
    with RawClient(strict.port) as client:
        if between:
            assert client.send(between).answer().status == 200
        client.socket.settimeout(0.1)
        client.send(b"GET /health HTTP/1.1\r\n")
        for _ in range(600):
            client.send(b"x: y\r\n")
            try:
                client.socket.recv(1, 2)  # MSG_PEEK: something has come
                break
            except TimeoutError:
                continue
        client.socket.settimeout(60)
        answer = client.answer()
        assert answer.status == 408
        assert "headers" in answer.error["message"]


def test_a_body_that_does_not_come(strict: RunningServer) -> None:
    with RawClient(strict.port) as client:
        answer = client.send(post(CHAT, GOOD)[:-5]).answer()
        assert answer.status == 408
        assert str(len(GOOD) - 5) in answer.error["message"]
        assert client.is_closed()


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\n"])
def test_connections_that_say_nothing_or_little_make_room(
    strict: RunningServer, said: bytes
) -> None:
    clients = [RawClient(strict.port).send(said) for _ in range(12)]
    try:
        with RawClient(strict.port) as other:
            assert other.send(GET_HEALTH).answer().status == 200
    finally:
        for client in clients:
            client.close()


def test_idle_connections_make_room(strict: RunningServer) -> None:
    clients = [RawClient(strict.port) for _ in range(6)]
    try:
        for client in clients:
            assert client.send(GET_HEALTH).answer().status == 200
        with RawClient(strict.port) as other:
            assert other.send(GET_HEALTH).answer().status == 200
    finally:
        for client in clients:
            client.close()
