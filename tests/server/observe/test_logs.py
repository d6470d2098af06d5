"""Logs: one line is one record whatever a client sent, and what it said is in none of them."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import HeadraceError, InvalidRequestError, TooManyRequestsError
from headrace.server.api.routes import all_routes
from headrace.server.observe.logs import JsonFormatter, PrettyFormatter, set_up_logging
from headrace.server.observe.record import HttpRecord, RequestRecord
from headrace.server.observe.request_log import RequestLog

SECRET = "xyzzy-quux"


@pytest.fixture
def restored() -> Iterator[None]:
    """Logging as it was: the process is pytest's."""
    root, own = logging.getLogger(), logging.getLogger("headrace")
    kept = (root.handlers[:], root.level, own.level, sys.excepthook)
    yield
    root.handlers[:], root.level, own_level, sys.excepthook = kept
    own.setLevel(own_level)
    root.setLevel(kept[1])
    logging.captureWarnings(False)


def make_record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("headrace.x", logging.INFO, "f.py", 1, message, args, None)
    vars(record).update(extra)
    return record


@given(st.text(), st.text())
def test_a_line_is_a_record_whatever_is_in_it(message: str, value: str) -> None:
    record = make_record("said %s", message, request_id=value, share=float("nan"))
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert found["message"] == f"said {message}"
    assert found["request_id"] == value
    assert datetime.fromisoformat(found["time"]).utcoffset() is not None


@given(st.text(), st.text())
def test_a_pretty_line_can_not_be_forged(message: str, value: str) -> None:
    """Whatever begins with a time is ours."""
    forged = f"{message}\n2026-01-01T00:00:00.000Z error   {message}\r\x1b[2J"
    text = PrettyFormatter().format(make_record("said %s", forged, request_id=f"{value}{forged}"))
    first, *others = text.splitlines()
    assert first.startswith("20")
    assert all(line.startswith("    | ") for line in others)
    assert all(c.isprintable() for c in text.replace("\n", ""))
    text.encode()  # also half characters


def test_an_exception_is_one_field_and_quotes_no_values() -> None:
    def fail() -> None:
        try:
            dict[str, int]()[SECRET]
        except KeyError:
            raise OSError(28, "no space") from None

    try:
        fail()
    except OSError:
        record = make_record("it failed")
        record.exc_info = sys.exc_info()
    found = json.loads(JsonFormatter().format(record))
    assert "OSError: [Errno 28] no space" in found["exception"]
    assert "in fail" in found["exception"]
    try:
        int(SECRET)
    except ValueError:
        record.exc_info = sys.exc_info()
    for formatter in (JsonFormatter(), PrettyFormatter()):
        assert SECRET not in formatter.format(record)
        assert "ValueError" in formatter.format(record)
    assert SECRET in JsonFormatter(show_content=True).format(record)


def http(error: HeadraceError | None = None, **fields: Any) -> HttpRecord:
    defaults: dict[str, Any] = {
        "request_id": "req-1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "arrived_s": 10.0,
        "ended_s": 12.5,
    }
    return HttpRecord(**{**defaults, **fields}, error=error)


def request(**fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "request_id": "req-1",
        "endpoint": "/v1/completions",
        "arrived_s": 10.0,
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "output_tokens": 3,
        "started_s": 10.4,
        "waited_s": 0.3,
        "first_token_s": 11.0,
        "last_token_s": 12.0,
        "ended_s": 12.0,
        "finish_reason": "stop",
        "prompt": SECRET,
        "answer": SECRET,
    }
    return RequestRecord(**{**defaults, **fields})


def logged(record: HttpRecord, *, show_content: bool = False, level: str = "debug") -> list[Any]:
    stream = io.StringIO()
    set_up_logging(level, "json", stream=stream)
    RequestLog(show_content).on_http(record)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.usefixtures("restored")
def test_the_line_of_a_request() -> None:
    (line,) = logged(http(requests=[request()], key_name="team-a"))
    expected = {
        "level": "info",
        "event": "request",
        "request_id": "req-1",
        "endpoint": "/v1/completions",
        "status": 200,
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "output_tokens": 3,
        "queue_s": 0.3,
        "ttft_s": 1.0,
        "tpot_s": 0.5,
        "e2e_s": 2.5,
        "key": "team-a",
    }
    assert {name: line[name] for name in expected} == expected
    assert SECRET not in json.dumps(line)
    (line,) = logged(http(requests=[request()]), show_content=True)
    assert line["prompt"] == line["answer"] == [SECRET]


@pytest.mark.usefixtures("restored")
def test_names_that_a_client_made_up_are_content() -> None:
    record = http()
    record.ignored_fields = ["xyzzy", "stream_options.quux"]
    (line,) = logged(record)
    assert line["ignored_fields"] == 2
    (line,) = logged(record, show_content=True)
    assert line["ignored_fields"] == "xyzzy,stream_options.quux"


@pytest.mark.usefixtures("restored")
def test_what_a_client_got_wrong_is_told_to_the_client() -> None:
    (line,) = logged(http(InvalidRequestError(f"{SECRET} is wrong", param="stop"), status=400))
    assert (line["error"], line["param"], line["status"]) == ("invalid_request", "stop", 400)
    assert SECRET not in json.dumps(line)
    (line,) = logged(http(InvalidRequestError("wrong", param="tools[0].function.name"), status=400))
    assert line["param"] == "tools[0].function.name"
    (line,) = logged(http(InvalidRequestError("wrong", param="tools[1].xyzzy.x"), status=400))
    assert line["param"] == "tools[1].?.?"
    (line,) = logged(http(InvalidRequestError("no such field", param=f"my {SECRET}"), status=400))
    assert SECRET not in json.dumps(line)
    # What the server itself could not do is told to its operator.
    (line,) = logged(http(TooManyRequestsError("256 wait", retry_after_s=1), status=429))
    assert (line["error"], line["cause"]) == ("too_many_requests", "256 wait")


@pytest.mark.usefixtures("restored")
def test_levels_and_other_loggers() -> None:
    assert logged(http(), level="warning") == []
    assert logged(http(route="/health"), level="info") == []
    assert len(logged(http(route="/health"), level="debug")) == 1
    stream = io.StringIO()
    set_up_logging("debug", "auto", stream=stream)
    logging.getLogger("uvicorn.error").warning("odd")
    logging.getLogger("asyncio").debug("never looked at")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["logger"] == "uvicorn.error"  # not a terminal: JSON


def test_an_uncaught_error_is_a_line_too() -> None:
    script = (
        "import threading; from headrace.server.observe.logs import set_up_logging\n"
        "set_up_logging('info', 'json')\n"
        f"thread = threading.Thread(target=lambda: int('{SECRET}'))\n"
        "thread.start(); thread.join()\n"
        f"raise RuntimeError('the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    in_thread, at_end = [json.loads(line) for line in done.stderr.splitlines()]
    assert in_thread["level"] == at_end["level"] == "critical"
    assert "RuntimeError: the end" in at_end["exception"]
    assert SECRET not in done.stderr


def ask(base_url: str, **fields: object) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": f"Repeat: {SECRET} {SECRET}"}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }
    return httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60)


def log_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_a_secret_prompt_is_in_no_log(start_server: Any) -> None:
    """Through success, refusal, a broken stream and a killed engine, at debug level."""
    server = start_server({"log_level": "debug", "log_format": "json"})
    assert ask(server.base_url).status_code == 200
    assert ask(server.base_url, stream=True).status_code == 200
    assert ask(server.base_url, temperature=SECRET).status_code == 400
    ignored = ask(server.base_url, **{SECRET: 1})
    assert ignored.status_code == 200
    assert SECRET in ignored.headers["x-headrace-warning"]
    assert ask(server.base_url, stop=[SECRET] * 99).status_code == 400
    assert ask(server.base_url, model=SECRET).status_code in (200, 404)
    assert httpx.get(f"{server.base_url}/{SECRET}?{SECRET}").status_code == 404
    assert httpx.post(f"{server.base_url}/v1/chat/completions", content=SECRET).status_code == 400
    (pid,) = server.engine_pids()
    body = {
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{server.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        assert '"error"' in "".join(lines)
    server.wait_for(lambda: "engine_lost" in server.log)
    server.wait_ready()
    assert ask(server.base_url).status_code == 200
    server.wait_for(lambda: len(log_lines(server.log)) >= 10)
    log = server.log
    assert SECRET not in log
    assert SECRET.split("-")[0] not in log
    lines_of = [line for line in log_lines(log) if line.get("event") == "request"]
    assert any(line.get("finish_reason") == "error" for line in lines_of)
    assert sum(line.get("finish_reason") == "length" for line in lines_of) >= 2
    # Both processes speak, in one format.
    assert any(line["logger"] == "headrace" for line in log_lines(log))


def test_content_is_logged_if_asked_for(start_server: Any) -> None:
    server = start_server({"log_content": True, "log_format": "json"})
    answer = ask(server.base_url).json()["choices"][0]["message"]["content"]
    server.wait_for(lambda: SECRET in server.log)
    (line,) = [line for line in log_lines(server.log) if line.get("endpoint", "").startswith("/v1")]
    assert SECRET in line["prompt"][0]
    assert line["answer"] == [answer]


@pytest.mark.usefixtures("restored")
def test_the_fields_of_every_body_are_names_that_may_be_logged() -> None:
    for route in all_routes():
        for name in route.request.__struct_fields__ if route.request is not None else ():
            (line,) = logged(http(InvalidRequestError("wrong", param=name), status=400))
            assert line["param"] == name, f"{route.path}: add its struct to request_log.py"
