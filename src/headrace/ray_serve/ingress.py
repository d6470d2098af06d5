"""Where clients' requests come in: it reads what a request asks for, sends it to a replica through
Ray Serve, and to another one while no byte of an answer has come.

Bytes of a stream are passed on as they come, each by itself: nothing waits for more. Knows HTTP and
Ray's handles; the choice of a replica is request_router.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from headrace.core.errors import HeadraceError
from headrace.policies.routing import Wanted
from headrace.ray_serve.replica import Begun, Sent
from headrace.ray_serve.settings import RaySettings, read_settings
from headrace.router.asked import read_asked, session_key
from headrace.router.settings import FORWARDED
from headrace.server.request.error_payload import error_payload

_NOT_PASSED = frozenset(
    {
        *("host", "connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"),
        *("transfer-encoding", "content-length", "expect", "accept-encoding"),
    }
)
_OPEN = frozenset({"/v1/models", "/health", "/ready"})
_ELSEWHERE = (429, 503)  # another replica may have room
PASSED_BY_S = 2.0
PATIENCE_S = 60.0  # for a replica, where all have failed

log = logging.getLogger(__name__)


class NotFoundError(HeadraceError):
    status = 404


class TooLargeError(HeadraceError):
    status = 413


class NoAnswerError(HeadraceError):
    """Every replica that was tried is gone."""

    status = 503


class BrokenAnswerError(HeadraceError):
    """A replica went away after it had begun to answer."""

    status = 502


class HeadraceIngress:
    def __init__(self, replicas: Any, settings: dict[str, Any]) -> None:
        self._settings: RaySettings = read_settings(settings)
        self._replicas = replicas.options(stream=True)
        self._failed_s: dict[str, float] = {}  # replicas that have not answered, and when

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except HeadraceError as error:
            headers = {"retry-after": "1"} if error.status == 503 else {}
            return JSONResponse(error_payload(error), error.status, headers)
        except ClientDisconnect:
            return Response(status_code=499)

    async def _answer(self, request: Request) -> Response:
        path = _path(request)
        if path not in FORWARDED | _OPEN:
            raise NotFoundError(
                f"There is no {path} here.",
                "Replicas' own paths are not reached through Ray Serve.",
            )
        body = await self._read(request)
        asked = read_asked(body, self._settings.prefix_bytes)
        session = request.headers.get(self._settings.session_header) or asked.user
        sent = Sent(
            wanted=Wanted(
                prompt_tokens=asked.prompt_tokens,
                answer_tokens=asked.likely_tokens,
                prefixes=asked.prefixes,
                session=None if session is None else session_key(session),
            ),
            tried=self._failing(),
        )
        begun, rest = await self._begin(sent, _request_bytes(request), body)
        headers = dict(begun.headers)
        if begun.is_whole:
            await _close(rest)
            return Response(begun.body, begun.status, headers)
        return StreamingResponse(_flow(begun.body, rest), begun.status, headers)

    def _failing(self) -> list[str]:
        """Those to be passed by where there are others: until Ray has found out for itself."""
        since_s = time.monotonic() - PASSED_BY_S
        self._failed_s = {name: at_s for name, at_s in self._failed_s.items() if at_s > since_s}
        return list(self._failed_s)

    async def _read(self, request: Request) -> bytes:
        most = self._settings.max_body_bytes
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise TooLargeError(
                    f"The request's body has more than {most:,} bytes.",
                    "Send less, or raise max_body_bytes.",
                )
            parts.append(part)
        return b"".join(parts)

    async def _begin(self, sent: Sent, request: bytes, body: bytes) -> tuple[Begun, Any]:
        """The first answer whose first byte comes. A replica that is full or gone is passed by;
        where all are full, their answer with the shortest Retry-After is the answer."""
        full: Begun | None = None
        error: Exception | None = None
        tries, until_s, pause_s = 0, time.monotonic() + PATIENCE_S, 0.1
        while tries < self._settings.tries or (full is None and time.monotonic() < until_s):
            tries += 1
            so_far = len(sent.tried)
            answer = self._replicas.answer.remote(sent, request, body)
            try:
                begun: Begun = await anext(aiter(answer))
            except asyncio.CancelledError:  # the client has left
                await _close(answer)
                raise
            except Exception as failed:  # Ray's errors, or the replica's own as one of Ray's
                error = failed
                log.warning("a replica has not answered: %s", _first_line(failed))
                self._failed_s |= dict.fromkeys(sent.tried[so_far:], time.monotonic())
                await _close(answer)
                if set(sent.tried[so_far:]) <= set(sent.tried[:so_far]):
                    # All have failed: Ray starts others, which takes seconds.
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 2.0)
                continue
            if begun.status not in _ELSEWHERE:
                return begun, answer
            await _close(answer)
            if full is None or _wait_s(begun) < _wait_s(full):
                full = begun
            if sent.tried[so_far:] and set(sent.tried[so_far:]) <= set(sent.tried[:so_far]):
                break  # all were asked
        if full is not None:
            return full, None
        raise NoAnswerError(
            f"No replica has answered: {_first_line(error)}.", "Try again; see `serve status`."
        )


async def _flow(first: bytes, rest: Any) -> AsyncIterator[bytes]:
    yield first
    try:
        async for part in rest:
            yield part
    except Exception as error:
        log.warning("an answer broke off: %s", _first_line(error))
        broken = BrokenAnswerError("The replica that was answering is gone.", "Ask again.")
        yield b"data: " + json.dumps(error_payload(broken)).encode() + b"\n\n"
    finally:
        await _close(rest)


async def _close(answer: Any) -> None:
    """The replica stops computing if it has not finished."""
    if answer is not None:
        with contextlib.suppress(Exception):
            answer.cancel()


def _path(request: Request) -> str:
    """Without the application's prefix."""
    return str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))


def _request_bytes(request: Request) -> bytes:
    """The request line and headers for a replica."""
    target = _path(request) + (f"?{request.url.query}" if request.url.query else "")
    lines = [f"{request.method} {target} HTTP/1.1"]
    lines += [f"{n}: {v}" for n, v in request.headers.items() if n.lower() not in _NOT_PASSED]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1", "replace")


def _wait_s(begun: Begun) -> float:
    given = dict(begun.headers).get("retry-after", "")
    return float(given) if given.isdigit() else 1e9


def _first_line(error: Exception | None) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".") if lines else type(error).__name__
