"""Clients that go away, or stop reading: what they held is free again, wherever they were."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from tests.server.conftest import RunningServer
from tests.server.raw_client import CHAT, RawClient, check_good, post

LONG_TOKENS = 3000  # takes far longer than any test waits before it leaves


def ask(*, stream: bool, words: int = 1, **more: object) -> bytes:
    body = {
        "messages": [{"role": "user", "content": "word " * words}],
        "max_tokens": LONG_TOKENS,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }
    return post(CHAT, json.dumps(body))


class Watched:
    """The server's own counts."""

    def __init__(self, server: RunningServer, client: httpx.Client) -> None:
        self.server = server
        self._client = client
        self.wait_running(0)
        self.aborted = self.read("request_success_total", 'finished_reason="abort"')
        self.generated = self.read("generation_tokens_total")

    def read(self, name: str, label: str = "") -> float:
        text = self._client.get("/metrics").text
        found = re.search(rf"^headrace:{name}{{[^}}]*{re.escape(label)}[^}}]*}} (\S+)$", text, re.M)
        assert found is not None, name
        return float(found[1])

    def wait(self, condition: Callable[[], bool]) -> None:
        self.server.wait_for(condition)

    def wait_running(self, count: int = 1) -> None:
        self.wait(lambda: self.read("num_requests_running") == count)

    def wait_free(self, aborted: int = 1) -> None:
        """It was noticed that the client left, long before the answer's end, and all is free."""
        self.wait(
            lambda: (
                self.read("request_success_total", 'finished_reason="abort"')
                == self.aborted + aborted
            )
        )
        self.wait(lambda: self.read("kv_blocks", 'state="used"') == 0)
        assert self.read("num_requests_running") == self.read("num_requests_waiting") == 0
        assert self.read("generation_tokens_total") - self.generated < LONG_TOKENS


@pytest.fixture
def watched(strict: RunningServer) -> Iterator[Watched]:
    with httpx.Client(base_url=strict.base_url) as client:
        yield Watched(strict, client)
    check_good(strict.port)
    assert "Traceback" not in strict.log


def test_mid_stream(watched: Watched) -> None:
    with RawClient(watched.server.port) as client:
        client.send(ask(stream=True))
        seen = b""
        while seen.count(b"data: ") < 4:
            seen += client.socket.recv(65536)
    watched.wait_free()


def test_while_an_answer_is_made_that_is_not_streamed(watched: Watched) -> None:
    with RawClient(watched.server.port) as client:
        client.send(ask(stream=False))
        watched.wait(lambda: watched.read("generation_tokens_total") > watched.generated)
    watched.wait_free()


@pytest.mark.parametrize("stream", [True, False])
def test_in_prefill(watched: Watched, stream: bool) -> None:
    # Every time another text: a prompt that the prefix cache knows has hardly a prefill.
    words = 2500 + stream
    with RawClient(watched.server.port) as client:
        client.send(ask(stream=stream, words=words))
        # Not by its blocks alone: they are told twice a second, and may be those of the request
        # before. That it was begun is told with the first of its many chunks.
        watched.wait_running()
        watched.wait(lambda: watched.read("kv_blocks", 'state="used"') > 0)
    watched.wait_free()


@pytest.mark.parametrize("stream", [True, False])
def test_while_queued(watched: Watched, stream: bool) -> None:
    with RawClient(watched.server.port) as first, RawClient(watched.server.port) as second:
        first.send(ask(stream=True)).socket.recv(1)
        second.send(ask(stream=stream))
        watched.wait(lambda: watched.read("num_requests_waiting") == 1)
        second.close()
        watched.wait(lambda: watched.read("num_requests_waiting") == 0)
        assert first.socket.recv(1), "the other one goes on"
    watched.wait_free(aborted=2)


def test_a_client_that_pipelines_and_leaves(watched: Watched) -> None:
    with RawClient(watched.server.port) as client:
        client.send(ask(stream=False) + ask(stream=False))
        watched.wait(lambda: watched.read("generation_tokens_total") > watched.generated)
    watched.wait_free()


def test_a_client_that_stops_reading_is_dropped(watched: Watched) -> None:
    with RawClient(watched.server.port, receive_bytes=4096) as client:
        client.send(ask(stream=True, logprobs=True, top_logprobs=20))
        client.socket.recv(1)
        watched.wait_free()
        assert "stopped reading and was dropped" in watched.server.log


def test_a_client_that_stops_reading_holds_up_nobody(watched: Watched) -> None:
    """Not even in the time until it is dropped."""
    with RawClient(watched.server.port, receive_bytes=4096) as client:
        client.send(ask(stream=True, logprobs=True, top_logprobs=20, max_tokens=60))
        client.socket.recv(1)
        check_good(watched.server.port)
