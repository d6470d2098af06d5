"""`headrace batch`: the format, going on after a stop, and a server that is full or breaks."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.batch_file import MAX_LINE_BYTES, done_before, outline_of, requests_of
from headrace.cli.batch_send import Sender
from headrace.cli.commands import app
from headrace.core.errors import ConfigError

Answer = tuple[int, dict[str, Any]]
GOOD: dict[str, Any] = {
    **{"custom_id": "a", "method": "POST"},
    **{"url": "/v1/completions", "body": {}},
}


class Service:
    """Answers each request by a function of its number among those with the same custom text."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.answer: Callable[[str, int], Answer] = lambda text, number: (200, completion(text))
        service, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                text = body["prompt"]
                with lock:
                    service.asked[text] += 1
                    number = service.asked[text]
                status, answer = service.answer(text, number)
                if status == 0:  # breaks the connection
                    self.close_connection = True
                    return
                sent = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(sent)))
                self.send_header("retry-after", "0")
                self.send_header("x-request-id", f"id-{text}")
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: object) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 128

        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self.http.server_port}"


def completion(text: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"object": "text_completion", "choices": [{"text": f"{text}!"}], "usage": usage}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.http.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def written(path: Path, count: int) -> Path:
    lines = [
        GOOD | {"custom_id": f"c{number}", "body": {"prompt": f"p{number}"}}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["batch", *map(str, arguments)])
    return done.exit_code, done.output


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_every_request_gets_its_own_answer(tmp_path: Path, service: Service) -> None:
    out = tmp_path / "out.jsonl"
    code, said = run(written(tmp_path / "in.jsonl", 50), out, "--url", service.url, "--json")
    assert code == 0, said
    found = answers(out)
    assert len(found) == 50
    for number in range(50):
        line = found[f"c{number}"]
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"] == f"id-p{number}"
        assert line["response"]["body"] == completion(f"p{number}")
    facts = json.loads(said[said.index("{") :])
    assert (facts["answered"], facts["prompt_tokens"], facts["output_tokens"]) == (50, 150, 100)
    assert set(service.asked.values()) == {1}


def test_a_second_run_asks_only_for_what_is_missing(tmp_path: Path, service: Service) -> None:
    source, out = written(tmp_path / "in.jsonl", 10), tmp_path / "out.jsonl"
    run(source, out, "--url", service.url)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:6]) + lines[6][:20])  # as a run that was killed leaves it
    service.asked.clear()
    code, _ = run(source, out, "--url", service.url)
    assert code == 0
    assert sum(service.asked.values()) == 4
    assert out.read_bytes().startswith(b"".join(lines[:6]))
    assert len(answers(out)) == 10
    before = out.read_bytes()
    assert run(source, out, "--url", "127.0.0.1:9")[0] == 0, "all was answered: nobody is asked"
    assert out.read_bytes() == before


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = written(tmp_path / "in.jsonl", 10), tmp_path / "out.jsonl"
    count = Sender._count

    def stopped(sender: Sender, found: Any, file: Any) -> None:
        if sender.sums.answered == 4:
            raise KeyboardInterrupt
        count(sender, found, file)

    with monkeypatch.context() as patch:
        patch.setattr(Sender, "_count", stopped)
        code, said = run(source, out, "--url", service.url)
    assert code == 130
    assert f"stopped: {out} has 4 of 10 answers; run the same again to go on" in said
    assert run(source, out, "--url", service.url)[0] == 0
    assert len(answers(out)) == 10


@pytest.mark.parametrize("status", [429, 503, 0])
def test_what_passes_is_tried_again(tmp_path: Path, service: Service, status: int) -> None:
    service.answer = lambda text, number: (200, completion(text)) if number > 2 else (status, {})
    out = tmp_path / "out.jsonl"
    code, _ = run(written(tmp_path / "in.jsonl", 3), out, "--url", service.url)
    assert code == 0
    assert set(service.asked.values()) == {3}
    assert len(answers(out)) == 3


def test_what_never_passes_is_left_for_the_next_run(tmp_path: Path, service: Service) -> None:
    source, out = written(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    service.answer = lambda text, n: (503, {}) if text == "p1" else (200, completion(text))
    code, said = run(source, out, "--url", service.url, "--attempts", 2)
    assert code == 1
    assert "1 got no answer (HTTP 503): run the same again" in said
    assert answers(out).keys() == {"c0", "c2"}
    service.answer = lambda text, n: (200, completion(text))
    assert run(source, out, "--url", service.url)[0] == 0
    assert answers(out).keys() == {"c0", "c1", "c2"}


def test_a_wrong_request_is_answered_with_its_error(tmp_path: Path, service: Service) -> None:
    service.answer = lambda text, number: (400, {"error": {"message": "no"}})
    source, out = written(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    code, said = run(source, out, "--url", service.url)
    assert code == 0
    assert "2 of the answers are errors" in said
    assert answers(out)["c0"]["response"]["body"] == {"error": {"message": "no"}}
    assert set(service.asked.values()) == {1}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        (json.dumps(GOOD | {"custom_id": 1}), "custom_id is not a text"),
        (json.dumps(GOOD | {"method": "GET"}), "expected POST"),
        (json.dumps(GOOD | {"url": "/metrics"}), "expected one of /v1/chat/completions"),
        (json.dumps(GOOD | {"body": "x"}), "body is not an object"),
        (json.dumps(GOOD | {"body": {"stream": True}}), "asks for a stream"),
        ('"' + "x" * MAX_LINE_BYTES + '"', "at most 8,388,608 are read"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_sent(
    tmp_path: Path, service: Service, line: str, why: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f"{json.dumps(GOOD | {'custom_id': 'first'})}\n\n{line}\n")
    code, said = run(source, tmp_path / "out.jsonl", "--url", service.url)
    assert code == 2
    assert f"{source}:3" in said.replace("\n", "")
    assert why in said
    assert not service.asked
    assert not (tmp_path / "out.jsonl").exists()


def test_other_bad_files(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n")
    with pytest.raises(ConfigError, match="twice"):
        outline_of(source)
    source.write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        outline_of(source)
    with pytest.raises(ConfigError, match="can't be read"):
        list(requests_of(tmp_path / "none"))
    source.write_text("something else\n")
    with pytest.raises(ConfigError, match="not overwritten"):
        done_before(source)
    assert run(source, source)[0] == 2


def test_a_server_of_its_own(tmp_path: Path, default_model_path: Path) -> None:
    """With the name that the file was written for."""
    body = {"model": "gpt-x", "prompt": "A river", "max_tokens": 4, "ignore_eos": True}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(GOOD | {"body": body}) + "\n")
    code, said = run(source, out, "-m", default_model_path)
    assert code == 0, said
    answer = answers(out)["a"]["response"]
    assert answer["status_code"] == 200, answer
    assert answer["body"]["model"] == "gpt-x"
    assert answer["body"]["usage"]["completion_tokens"] == 4
