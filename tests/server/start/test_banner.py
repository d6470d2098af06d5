"""The socket and the words of a start, without a server behind them."""

from __future__ import annotations

import json
import logging
import shlex
import socket
from dataclasses import replace

import pytest

from headrace.core.errors import ConfigError
from headrace.core.server_config import LogFormat
from headrace.server.edge.listen import bind, is_loopback, listen, url_of
from headrace.server.start.banner import Serving, StartUp, curl_line

SERVING = Serving(
    url="http://127.0.0.1:8000",
    model="a-model",
    fingerprint="hr-0123456789ab",
    context_tokens=100,
    kv_tokens=1000,
    has_chat=True,
    has_keys=False,
)


@pytest.mark.parametrize("name", ["plain", "it's", 'a "b" $HOME `id`', "ünïcode \\ !!"])
def test_the_curl_line_survives_a_shell(name: str) -> None:
    words = shlex.split(curl_line(replace(SERVING, model=name)))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == name


def test_a_model_without_a_template_is_asked_otherwise() -> None:
    words = shlex.split(curl_line(replace(SERVING, has_chat=False)))
    assert words[1].endswith("/v1/completions")
    assert "prompt" in json.loads(words[-1])


def test_a_key_is_left_to_the_shell() -> None:
    assert '"Authorization: Bearer $HEADRACE_API_KEY"' in curl_line(replace(SERVING, has_keys=True))


def test_where_logs_are_json_a_start_is_too(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    start_up = StartUp(LogFormat.JSON)
    start_up.phase("weights", 0.5)
    start_up.note("a note")
    start_up.ready(SERVING)
    assert [record.__dict__["event"] for record in caplog.records] == ["phase", "note", "ready"]
    assert caplog.records[-1].__dict__["url"] == SERVING.url
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_urls_are_for_this_machine() -> None:
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with bind("localhost", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            sock = bind("::1", 0)
        except ConfigError:
            return  # the kernel has none after all
        with sock:
            assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


def test_two_that_start_at_once_do_not_share_a_port() -> None:
    """Both may bind; the second to listen is told."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            listen(first, 5)
            with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 is taken"):
                listen(second, 5)


def test_nobody_connects_before_somebody_listens() -> None:
    with (
        bind("127.0.0.1", 0) as sock,
        socket.socket() as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect(sock.getsockname())
