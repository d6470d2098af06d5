"""Sends the requests of a batch to a server, so many at once, and writes each answer when it comes.

A refusal that will pass (429, 503) and a broken connection are tried again, as the server's
Retry-After says; any other answer is final, errors too. What never got a final answer is not
written: the next run sends it again. Knows HTTP; not where the requests come from.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import IO, Any

from headrace.cli.batch_file import BatchRequest, line_of
from headrace.doctor.endpoint import Endpoint

PASSING = frozenset({408, 429, 500, 502, 503, 504})
MAX_WAIT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Sums:
    """What has happened so far; one thread writes it."""

    answered: int = 0
    refused: int = 0  # final answers that are errors
    left: int = 0  # no final answer
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    request: BatchRequest
    status: int | None  # None: none came
    request_id: str = ""
    body: Any = None
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Sender:
    endpoint: Endpoint
    concurrency: int
    attempts: int
    timeout_s: float
    sums: Sums = field(default_factory=Sums)
    _own: threading.local = field(default_factory=threading.local)
    _connections: list[http.client.HTTPConnection] = field(default_factory=list)  # one a thread
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, requests: Iterator[BatchRequest], out: IO[bytes]) -> Iterator[Sums]:
        """The sums after every answer. Leaving early keeps what was answered."""
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="batch")
        open_: set[Future[_Answered]] = set()
        try:
            for request in requests:
                open_.add(pool.submit(self._ask, request))
                while len(open_) >= 2 * self.concurrency:  # no more than these in memory
                    yield from self._take(open_, out)
            while open_:
                yield from self._take(open_, out)
        finally:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for connection in self._connections:  # ends the requests that still run
                connection.close()

    def _take(self, open_: set[Future[_Answered]], out: IO[bytes]) -> Iterator[Sums]:
        done, _ = wait(open_, return_when=FIRST_COMPLETED)
        open_ -= done
        for each in done:
            self._count(each.result(), out)
            yield self.sums

    def _count(self, found: _Answered, out: IO[bytes]) -> None:
        if found.status is None:
            self.sums.left += 1
            self.sums.last_failure = found.failure
            return
        out.write(line_of(found.request, found.status, found.request_id, found.body))
        out.flush()
        self.sums.answered += 1
        self.sums.refused += found.status != 200
        usage = found.body.get("usage") if isinstance(found.body, dict) else None
        if isinstance(usage, dict):
            self.sums.prompt_tokens += _whole(usage, "prompt_tokens", "input_tokens")
            self.sums.output_tokens += _whole(usage, "completion_tokens", "output_tokens")

    def _ask(self, request: BatchRequest) -> _Answered:
        failure = ""
        for attempt in range(self.attempts):
            wait_s = min(MAX_WAIT_S, 0.5 * 2**attempt)
            try:
                status, headers, body = self._post(request)
            except (OSError, http.client.HTTPException) as error:
                self._own.connection.close()  # the next request connects again
                failure = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if status not in PASSING:
                    return _Answered(
                        request=request, status=status, body=_json(body),
                        request_id=headers.get("x-request-id", ""),
                    )  # fmt: skip
                failure = f"HTTP {status}"
                wait_s = _seconds(headers.get("retry-after"), wait_s)
            if attempt + 1 < self.attempts and self._stopped.wait(wait_s):
                break
        return _Answered(request=request, status=None, failure=failure)

    def _post(self, request: BatchRequest) -> tuple[int, dict[str, str], bytes]:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self.endpoint.connection(self.timeout_s)
            self._connections.append(connection)
        sent = json.dumps(request.body).encode()
        headers = self.endpoint.headers() | {"Content-Type": "application/json"}
        connection.request("POST", f"{self.endpoint.path}{request.url}", body=sent, headers=headers)
        reply = connection.getresponse()
        body = reply.read()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, body


def shown(sums: Sums, whole: int, began_s: float) -> str:
    """One line about how far it is."""
    rate = sums.output_tokens / max(time.monotonic() - began_s, 1e-9)
    text = f"{sums.answered:,} of {whole:,} answered, {rate:,.0f} output tokens/s"
    if sums.refused:
        text += f", {sums.refused:,} with an error"
    return text + (f", {sums.left:,} without an answer" if sums.left else "")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {"error": {"message": body[:200].decode("utf-8", "replace")}}


def _seconds(text: str | None, otherwise: float) -> float:
    try:
        return min(MAX_WAIT_S, max(0.0, float(text or "")))
    except ValueError:
        return otherwise


def _whole(usage: dict[str, Any], *names: str) -> int:
    found = next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)
    return int(found)
