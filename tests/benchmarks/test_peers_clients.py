"""The closed loop over a small HTTP server: counts, first tokens, refusals."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from peers.clients import has_text, read_event, run_clients


class Pretend(BaseHTTPRequestHandler):
    """Streams as many words as are asked for; a prompt that begins with 7 is refused."""

    asked: list[dict[str, Any]]
    running = 0
    most_running = 0
    lock = threading.Lock()
    short = 0  # tokens left out

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.asked.append(body)
            type(self).running += 1
            type(self).most_running = max(self.running, self.most_running)
        try:
            self.answer(body)
        finally:
            with self.lock:
                type(self).running -= 1

    def answer(self, body: dict[str, Any]) -> None:
        if body["prompt"][0] == 7:
            self.send_response(400)
            self.end_headers()
            time.sleep(0.05)  # the body comes in a packet of its own
            self.wfile.write(b'{"error": "seven"}')
            return
        self.send_response(200)
        self.end_headers()
        events: list[dict[str, Any]] = [{"choices": [{"text": ""}]}]
        events += [{"choices": [{"text": "w"}]}] * body["max_tokens"]
        events.append(
            {"choices": [], "usage": {"completion_tokens": body["max_tokens"] - self.short}}
        )
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def pretend() -> Iterator[tuple[int, type[Pretend]]]:
    class Mine(Pretend):
        asked: list[dict[str, Any]] = []  # noqa: RUF012 (of this test alone)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, Mine
    server.shutdown()
    thread.join()
    server.server_close()


def test_all_prompts_are_sent_once_after_the_warm_one(pretend: tuple[int, type[Pretend]]) -> None:
    port, handler = pretend
    prompts = [[100 + number, 1] for number in range(10)]
    load = run_clients(port, "peer", [1, 2], prompts, 3, 5, 60)
    assert load.tokens == 50
    assert len(load.first_token_s) == 10
    assert all(0 < first_s <= load.taken_s for first_s in load.first_token_s)
    assert handler.asked[0]["prompt"] == [1, 2]
    assert sorted(asked["prompt"] for asked in handler.asked[1:]) == prompts
    assert 1 <= handler.most_running <= 3
    for asked in handler.asked:
        assert (asked["model"], asked["max_tokens"], asked["ignore_eos"]) == ("peer", 5, True)
        assert (asked["temperature"], asked["stream"]) == (0, True)


def test_a_refusal_is_an_error_with_what_was_said(pretend: tuple[int, type[Pretend]]) -> None:
    with pytest.raises(RuntimeError, match=r"400.*seven"):
        run_clients(pretend[0], None, [1], [[7]], 1, 5, 60)


def test_too_few_tokens_are_an_error(pretend: tuple[int, type[Pretend]]) -> None:
    pretend[1].short = 1
    with pytest.raises(RuntimeError, match="8 tokens came, not 10"):
        run_clients(pretend[0], None, [1], [[2], [3]], 1, 5, 60)


def test_events_are_told_from_what_else_a_stream_holds() -> None:
    assert read_event(b"\r\n") is None
    assert read_event(b": a comment\n") is None
    assert read_event(b"data: [DONE]\n") is None
    event = read_event(b'data: {"choices": [{"text": "a"}]}\r\n')
    assert event is not None
    assert has_text(event)
    assert not has_text({"choices": [{"text": ""}]})
    assert not has_text({"choices": [], "usage": {}})
    with pytest.raises(RuntimeError, match="full"):
        read_event(b'data: {"error": "full"}')
