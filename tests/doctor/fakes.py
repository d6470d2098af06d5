"""Small servers that speak each engine's metrics, settings and pathologies.

`render` writes a page in an engine's own names from standard values; the names themselves are
checked against pages typed by hand in test_scrape.py. `FakeEngine` serves pages in order, settings
by path, and answers chats as a `Script` says: places, times, prefix cache, errors inside streams.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headrace.doctor.endpoint import Endpoint
from headrace.doctor.names import EngineNames, Source

BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60,
          100, 300, 1000, 3000, 10_000, 30_000, 100_000)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Values:
    """One page in standard names."""

    levels: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    histograms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # values so far
    info: str = ""  # a line as it is

    @property
    def names(self) -> set[str]:
        return {*self.levels, *self.counters, *self.groups, *self.histograms}


def has(names: EngineNames, wanted: set[str]) -> bool:
    tables = (names.levels, names.counters, names.groups, names.histograms, names.means)
    return all(any(name in table for table in tables) for name in wanted)


def render(names: EngineNames, values: Values) -> str:
    lines = []
    for table, given in ((names.levels, values.levels), (names.counters, values.counters)):
        for name, value in given.items():
            if name in table:
                lines.append(_line(table[name][0], value))
    for name, parts in values.groups.items():
        if name in names.groups:
            source, label = names.groups[name]
            lines += [f'{source.name}{{{label}="{part}"}} {v}' for part, v in parts.items()]
        elif name in names.counters:
            lines.append(_line(names.counters[name][0], sum(parts.values())))
    for name, seen in values.histograms.items():
        if name in names.histograms:
            lines += _histogram(names.histograms[name][0], seen)
        elif name in names.means:
            total, count = names.means[name]
            lines += [_line(total, sum(seen)), _line(count, len(seen))]
    return "\n".join([*lines, values.info, ""])


def _line(source: Source, value: float) -> str:
    labels = ",".join(f'{key}="{text}"' for key, text in source.labels)
    return f"{source.name}{{{labels}}} {value / source.scale}"


def _histogram(source: Source, seen: tuple[float, ...]) -> Iterator[str]:
    for bound in BOUNDS:
        count = sum(1 for value in seen if value <= bound)
        yield f'{source.name}_bucket{{le="{bound / source.scale}"}} {count}'
    yield f'{source.name}_bucket{{le="+Inf"}} {len(seen)}'
    yield f"{source.name}_sum {sum(seen) / source.scale}"
    yield f"{source.name}_count {len(seen)}"


@dataclass(kw_only=True)
class Script:
    """How chats are answered. Times are what the fake sleeps, so keep them small."""

    places: int = 64
    token_s: float = 0.0
    prompt_token_s: float = 0.0
    caches_prefixes: bool = True
    tells_usage: bool = True
    error: str = ""  # an error inside the stream, after two tokens
    status: int = 200
    redirects: bool = False
    cuts: bool = False  # the stream ends without its end
    whole: str = ""  # a content type: an answer of this kind instead of a stream
    compile_s: float = 0.0  # of a schema whose text is new
    refuses: tuple[str, ...] = ()  # fields of a body that get a 400


class FakeEngine:
    def __init__(
        self,
        pages: list[str],
        *,
        paths: Mapping[str, Any] | None = None,
        script: Script | None = None,
    ) -> None:
        self.pages = pages
        self.paths = dict(paths or {})
        self.script = script or Script()
        self.asked: list[dict[str, Any]] = []
        self.generated = 0
        self.reads = 0
        self.places = threading.BoundedSemaphore(self.script.places)
        self.prefixes: set[str] = set()
        self.schemas: set[str] = set()
        self.keys: list[str | None] = []

    def page(self) -> str:
        """The next of the pages; the last one again and again."""
        text = self.pages[min(self.reads, len(self.pages) - 1)] if self.pages else ""
        self.reads += 1
        return text


@contextmanager
def serving(engine: FakeEngine) -> Iterator[Endpoint]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(engine))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_address[1]}", timeout_s=10)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            engine.keys.append(self.headers.get("Authorization"))
            if engine.script.redirects:
                self.send_response(307)
                self.send_header("Location", "http://elsewhere.example/")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif self.path == "/metrics" and engine.pages:
                self._reply(200, engine.page())
            elif self.path in engine.paths:
                found = engine.paths[self.path]
                self._reply(200, found if isinstance(found, str) else json.dumps(found))
            else:
                self._reply(404, "not here")

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            body = json.loads(self.rfile.read(length))
            engine.asked.append(body)
            script = engine.script
            refused = [name for name in script.refuses if name in body]
            schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
            if schema is not None and str(schema) not in engine.schemas:
                engine.schemas.add(str(schema))
                time.sleep(script.compile_s)
            if script.status != 200 or refused:
                status = 400 if refused else script.status
                self._reply(status, json.dumps({"error": {"message": f"no {refused or 'luck'}"}}))
                return
            if script.whole:
                self._reply(200, "<html></html>" if "html" in script.whole else "{}", script.whole)
                return
            with engine.places:
                self._stream(body)

        def _stream(self, body: dict[str, Any]) -> None:
            script = engine.script
            is_chat = "messages" in body
            prompt = str(body["messages"][-1]["content"] if is_chat else body["prompt"])
            stem, count = prompt.partition(" Question:")[0], len(prompt.split())
            is_cached = script.caches_prefixes and stem in engine.prefixes
            engine.prefixes.add(stem)
            time.sleep(0 if is_cached else count * script.prompt_token_s)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            if is_chat:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            wanted = int(body["max_tokens"])
            for number in range(wanted):
                if script.error and number == 2:
                    self._event({"error": {"message": script.error}})
                    return
                if number:
                    time.sleep(script.token_s)
                engine.generated += 1
                text = {"delta": {"content": "word "}} if is_chat else {"text": "word "}
                self._event({"choices": [text]})
            if script.cuts:
                return
            end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            self._event({"choices": [end | {"finish_reason": "length"}]})
            if script.tells_usage:
                cached = {"cached_tokens": count - 4 if is_cached else 0}
                usage = {"prompt_tokens": count, "completion_tokens": wanted,
                         "prompt_tokens_details": cached}  # fmt: skip
                self._event({"choices": [], "usage": usage})
            self._write("data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self._write(f"data: {json.dumps(event)}\n\n")

        def _write(self, text: str) -> None:
            self.wfile.write(text.encode())
            self.wfile.flush()

        def _reply(self, status: int, text: str, content_type: str = "") -> None:
            data = text.encode()
            self.send_response(status)
            if content_type:
                self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


MODELS: dict[str, Any] = {"data": [{"id": "fake-model", "max_model_len": 8192}]}
Scenario = Callable[[], tuple[Values, Values]]
