"""What the fuzzer sends: a case is a function of a seed and a number, and nothing else.

A case is bytes and the manner of sending them: whole, in slow pieces, chunked, several at once, cut
off, half-closed, or left alone. Which fields an endpoint takes is read from the server's own
description. Knows HTTP and bodies; what answers must look like is fuzz_checks.py's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import attack_wire
import fuzz_bodies
import fuzz_values
from fuzz_bodies import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, STORED_ID

Chooser = random.Random

READ, CUT, LEAVE, HALF_CLOSE = "read", "cut", "leave", "half-close"
LARGEST = 4_000_000  # characters of one value

# How often which endpoint is asked.
_WEIGHTS = {CHAT: 30, COMPLETIONS: 20, RESPONSES: 14, MESSAGES: 12, EMBEDDINGS: 6}

_GETS = (
    *("/health", "/ready", "/ping", "/load", "/version", "/v1/models", "/tokenizer_info"),
    *("/", "/history", "/history?window=1h&since=0", "/diagnosis"),
    *("/metrics", "/openapi.json", "/v1/models/smollm2-135m-instruct", "/v1/models/none", "/"),
    *("/nowhere", "/v1", "/v1/", "/v1/chat/completions", "/HEALTH", "/health/", "//health", "/%00"),
    *(f"/v1/responses/{STORED_ID}", f"/v1/responses/{STORED_ID}/input_items"),
)
_QUERIES = (
    *("", "", "limit=1", "limit=-1", "limit=x", "order=asc&limit=100", "order=up", "after=msg_0"),
    *(
        "stream=true",
        "include[]=a",
        "limit=1&limit=2",
        "%ff=%00",
        "a=" + "b" * 3000,
        "limit=9" * 40,
    ),
)
_METHODS = ("GET", "GET", "GET", "HEAD", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "POST")
_HEADERS: tuple[tuple[str, str], ...] = (
    *(("accept", "text/event-stream"), ("accept", "\x7f"), ("accept-encoding", "gzip, br")),
    *(("authorization", "Bearer x"), ("authorization", "Bearer " + "y" * 5000)),
    *(("x-api-key", ""), ("x-request-id", "a" * 128), ("x-request-id", "a" * 129)),
    *(("x-request-id", "é"), ("x-request-id", "a b"), ("content-type", "text/plain")),
    *(("content-type", "application/json; charset=utf-16"), ("content-type", "")),
    *(("content-type", "application/vnd.x+json"), ("content-encoding", "gzip")),
    *(("content-encoding", "identity"), ("host", "evil.example"), ("host", "")),
    *(("host", "localhost:99999"), ("origin", "https://evil.example"), ("origin", "null")),
    *(("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-00"), ("traceparent", "x")),
    *(("expect", "100-continue"), ("expect", "x"), ("upgrade", "h2c"), ("upgrade", "websocket")),
    *(("connection", "keep-alive"), ("connection", "upgrade"), ("cookie", "a=b; " * 200)),
    *(("transfer-encoding", "identity"), ("te", "trailers"), ("range", "bytes=0-1")),
    *(("x-long", "z" * 20_000), ("x-too-long", "z" * 40_000), ("anthropic-version", "1")),
)
_NOT_HTTP: tuple[bytes, ...] = (
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/0.9\r\n\r\n", b"\r\n\r\n"),
    *(b"GET /\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *(b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"),
    *(b"GET / HTTP/1.1\nhost: x\n\n", b"GET http://x/health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"),
    *(b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"GET * HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"),
    *(b"GET /\xff\xfe HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"\0" * 100, b"A" * 70_000),
    *(b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n",),
    *(b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1e3\r\n\r\n{}",),
    b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n"
    b"content-length: 3\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: "
    + b"0" * 5000
    + b"2\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n",
    b"GET /version HTTP/1.1\r\n\r\n",
    b"GET /version HTTP/1.0\r\n\r\n",
    b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\nx: a\r\n b\r\n\r\n",
    b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\nx: a\x00b\r\n\r\n",
)


@dataclass(slots=True, kw_only=True)
class Case:
    number: int
    family: str  # what kind of attempt it is
    method: str = "POST"
    path: str = CHAT  # without its query
    pieces: list[bytes]  # sent one after the other
    pause_s: float = 0.0  # between them
    ending: str = READ
    cut_bytes: int = 0  # of the answer that are read before leaving
    answers: int = 1  # how many are to come
    is_http: bool = True  # else the server may close without a word
    own_connection: bool = False
    body: dict[str, Any] | None = field(default=None, repr=False)  # where it is known

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


class Cases:
    def __init__(
        self,
        seed: int,
        description: dict[str, Any],
        *,
        without: frozenset[str] = frozenset(),
        largest: int = LARGEST,
    ) -> None:
        self.seed = seed
        self._fields = _read_fields(description)
        self._without = without
        self._largest = 100 if "sizes" in without else largest
        self._paths = list(fuzz_bodies.GOOD)
        self._weights = [_WEIGHTS.get(path, 5) for path in self._paths]

    def make(self, number: int) -> Case:
        chooser = random.Random(f"{self.seed}:{number}")
        kind = chooser.random()
        if kind < 0.06:
            return self._looking(chooser, number)
        if kind < 0.1:
            return self._not_http(chooser, number)
        path = chooser.choices(self._paths, self._weights)[0]
        body = fuzz_bodies.GOOD[path](chooser, "grammars" not in self._without)
        family = "good"
        if kind >= 0.14:
            family = "field"
            for _ in range(chooser.choice((1, 1, 1, 2, 3))):
                self._change_field(chooser, path, body)
        body = fuzz_bodies.tame(path, body)
        if family == "field" and chooser.random() < 0.85:
            fuzz_bodies.spoil(path, body)
        if family == "good" and chooser.random() < 0.3:
            return self._misbehaving(chooser, number, path, body)
        data = fuzz_bodies.encode(body)
        sent_body: dict[str, Any] | None = body
        if kind > 0.85:
            family, sent_body = "text", None
            data = fuzz_bodies.break_text(chooser, data)
        elif kind > 0.8:
            return self._odd_headers(chooser, number, path, data)
        return Case(
            number=number,
            family=family,
            path=path,
            pieces=[attack_wire.make_head("POST", path, [], len(data)), data],
            body=sent_body,
        )

    def _change_field(self, chooser: Chooser, path: str, body: dict[str, Any]) -> None:
        fields = self._fields[path]
        names = list(fields)
        name = chooser.choice(names)
        kind = chooser.random()
        if kind < 0.5:
            body[name] = fuzz_values.of_type(chooser, fields[name], largest=self._largest)
        elif kind < 0.8:
            body[name] = fuzz_values.anything(chooser)
        elif kind < 0.85:
            body[fuzz_values.text(chooser, 8)] = fuzz_values.anything(chooser)
        elif kind < 0.92 and body:
            body.pop(chooser.choice(list(body)))
        else:
            _change_within(chooser, body)

    # -- other than a plain request ----------------------------------------------------------------

    def _looking(self, chooser: Chooser, number: int) -> Case:
        path, method = chooser.choice(_GETS), chooser.choice(_METHODS)
        if chooser.random() < 0.1:
            path = "/v1/models/" + quote(fuzz_values.text(chooser, 20).encode("utf-8", "replace"))
        query = chooser.choice(_QUERIES)
        headers = [chooser.choice(_HEADERS)] if chooser.random() < 0.3 else []
        target = f"{path}?{query}" if query else path
        return Case(
            number=number,
            family="look",
            method=method,
            path=path,
            pieces=[attack_wire.make_head(method, target, headers, None)],
            is_http=not headers,
            own_connection=bool(headers),
        )

    def _not_http(self, chooser: Chooser, number: int) -> Case:
        data = chooser.choice(_NOT_HTTP)
        if chooser.random() < 0.3:
            good = attack_wire.post("/tokenize", {"prompt": "a"})
            data = fuzz_bodies.break_text(chooser, good)
        return Case(
            number=number,
            family="not http",
            path="",
            pieces=[data],
            # What is not whole is waited for: rarely, since it takes the server's whole patience.
            ending=HALF_CLOSE if chooser.random() < 0.97 else READ,
            is_http=False,
            own_connection=True,
        )

    def _odd_headers(self, chooser: Chooser, number: int, path: str, data: bytes) -> Case:
        headers = chooser.sample(_HEADERS, chooser.choice((1, 2, 4)))
        return Case(
            number=number,
            family="headers",
            path=path,
            pieces=[attack_wire.make_head("POST", path, list(headers), len(data)), data],
            is_http=False,
            ending=HALF_CLOSE if chooser.random() < 0.5 else READ,
            own_connection=True,
        )

    def _misbehaving(self, chooser: Chooser, number: int, path: str, body: dict[str, Any]) -> Case:
        """A good request of a client that is not."""
        data = fuzz_bodies.encode(body)
        head = attack_wire.make_head("POST", path, [], len(data))
        case = Case(
            number=number,
            family="good",
            path=path,
            pieces=[head, data],
            body=body,
            own_connection=True,
        )
        kind = chooser.randrange(8)
        if kind == 0:
            case.family, case.ending = "leaves", LEAVE
        elif kind == 1:
            case.family, case.ending, case.cut_bytes = "cut", CUT, chooser.choice((1, 20, 200, 900))
        elif kind == 2:
            case.family, case.pause_s = "slow", 0.02
            step = max(1, len(data) // 4)
            case.pieces = [head[:9], head[9:]]
            case.pieces += [data[place : place + step] for place in range(0, len(data), step)]
        elif kind == 3:
            case.family, case.ending = "half-closes", HALF_CLOSE
        elif kind == 4:
            case.family, case.answers = "pipelined", chooser.choice((2, 3, 6))
            case.pieces = [(head + data) * case.answers]
        elif kind == 5:
            case.family = "chunked"
            case.pieces = [_chunked_head(path), *_chunks(chooser, data)]
        elif kind == 6:
            case.family, case.ending, case.is_http = "unfinished", LEAVE, False
            case.pieces = [head, data[: chooser.randrange(len(data))]]
        else:
            case.family, case.is_http = "broken chunks", False
            broken = fuzz_bodies.break_text(chooser, b"".join(_chunks(chooser, data)))
            case.pieces, case.ending = [_chunked_head(path), broken], HALF_CLOSE
        return case


def _change_within(chooser: Chooser, body: dict[str, Any]) -> None:
    """Somewhere inside of what is there."""
    node: Any = body
    for _ in range(6):
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chooser.choice(keys)
        inner = node[key]
        if isinstance(inner, (dict, list)) and inner and chooser.random() < 0.8:
            node[key] = inner = inner.copy()  # what is shared with other cases stays as it is
            node = inner
            continue
        node[key] = fuzz_values.anything(chooser)
        return


def _chunked_head(path: str) -> bytes:
    headers = [("transfer-encoding", "chunked"), ("content-type", "application/json")]
    return attack_wire.make_head("POST", path, headers, None)


def _chunks(chooser: Chooser, data: bytes) -> list[bytes]:
    found, place = [], 0
    while place < len(data):
        part = data[place : place + chooser.choice((1, 7, 100, 1000))]
        extension = chooser.choice((b"", b"", b";a=b", b";" + b"x" * 100))
        found.append(b"%x%b\r\n%b\r\n" % (len(part), extension, part))
        place += len(part)
    trailer = chooser.choice((b"", b"x-after: 1\r\n"))
    return [*found, b"0\r\n" + trailer + b"\r\n"]


def _read_fields(description: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of every endpoint: its fields and their types, references followed."""
    schemas = description["components"]["schemas"]
    found: dict[str, dict[str, Any]] = {}
    for path in fuzz_bodies.GOOD:
        content = description["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        found[path] = dict(sorted(_resolve(schema, schemas)["properties"].items()))
        found[path] = {name: _resolve(each, schemas) for name, each in found[path].items()}
    return found


def _resolve(schema: Any, schemas: dict[str, Any]) -> Any:
    while isinstance(schema, dict) and "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if isinstance(schema, dict) and "anyOf" in schema:
        return {**schema, "anyOf": [_resolve(each, schemas) for each in schema["anyOf"]]}
    return schema
