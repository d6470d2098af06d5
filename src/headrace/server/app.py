"""The ASGI application: finds the endpoint, reads the body, sends the answer, shapes errors.

A client that goes away cancels the endpoint wherever it is. Knows HTTP; not what is answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.core.errors import (
    ClientTimeoutError,
    HeadraceError,
    PayloadTooLargeError,
)
from headrace.server.call import (
    Call,
    Endpoint,
    Reply,
    StreamReply,
    error_reply,
    new_id,
)
from headrace.server.record import HttpRecord
from headrace.server.routes import Route
from headrace.server.service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger(__name__)


class NotFoundError(HeadraceError):
    status = 404


class MethodError(HeadraceError):
    status = 405


class App:
    def __init__(self, service: Service, routes: list[Route]) -> None:
        self._service = service
        self._routes = {route.path: route for route in routes}
        self._open_ended = [(r.path.partition("{")[0], r) for r in routes if "{" in r.path]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection; expected http")
        call = Call(
            method=scope["method"],
            path=scope["path"],
            headers={k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]},
            request_id=new_id("req"),
            query=scope["query_string"].decode("latin-1"),
        )
        exchange = _Exchange(self._service, call, receive, send)
        try:
            await exchange.answer(self._find)
        finally:
            self._tell(call, exchange.status)

    def _tell(self, call: Call, status: int) -> None:
        record = HttpRecord(
            request_id=call.request_id,
            method=call.method,
            route=call.route,
            status=status,
            arrived_s=call.arrived_s,
            ended_s=time.monotonic(),
            key_name=call.key_name,
            traceparent=call.headers.get("traceparent"),
            tracestate=call.headers.get("tracestate"),
            error=call.error,
            requests=call.records,
        )
        for watcher in self._service.http_watchers:
            watcher.on_http(record)

    def _find(self, call: Call) -> Endpoint:
        route = self._routes.get(call.path)
        for start, candidate in self._open_ended:
            if route is None and call.path.startswith(start) and call.path != start:
                route = candidate
        if route is None:
            raise NotFoundError(
                f"There is nothing at {call.path[:200]!r}.",
                "GET /openapi.json lists what there is.",
            )
        call.route = route.path
        if call.method not in route.methods:
            raise MethodError(
                f"{call.path} does not take {call.method}; expected {', '.join(route.methods)}.",
                "Use another method.",
            )
        return route.endpoint


class _Exchange:
    """One request and its answer over one pair of ASGI channels."""

    def __init__(self, service: Service, call: Call, receive: Receive, send: Send) -> None:
        self._service = service
        self._call = call
        self._receive = receive
        self._send = send
        self._started = False
        self.status = 499  # as nginx: the client left first

    async def answer(self, find: Callable[[Call], Endpoint]) -> None:
        try:
            endpoint = find(self._call)
            self._call.body = await self._read_body()
            await self._watched(self._run(endpoint))
        except HeadraceError as error:
            self._call.error = error
            await self._send_reply(error_reply(error))
        except _ClientGone:
            pass

    async def _run(self, endpoint: Endpoint) -> None:
        try:
            reply = await endpoint(self._service, self._call)
            if isinstance(reply, StreamReply):
                await self._send_stream(reply)
                return
        except HeadraceError as error:
            self._call.error = error
            reply = error_reply(error)
        except Exception:
            log.exception("an endpoint failed", extra={"request_id": self._call.request_id})
            self._call.error = HeadraceError(
                "Something went wrong in the server.",
                f"Its log has the request id {self._call.request_id}.",
            )
            reply = error_reply(self._call.error)
        await self._send_reply(reply)

    async def _watched(self, work: Awaitable[None]) -> None:
        """Do the work, unless the client goes away first."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not gone.done():
                raise

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _read_body(self) -> bytes:
        most = self._service.config.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self._service.config.client_timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise PayloadTooLargeError(
                            f"The body has more than {most} bytes.",
                            "Send less, or start the server with --max-body.",
                        )
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise ClientTimeoutError(
                f"The body did not come within {self._service.config.client_timeout_s:g} s.",
                "Send it faster.",
            ) from error

    # -- out -------------------------------------------------------------------------------------

    async def _send_reply(self, reply: Reply) -> None:
        headers = {"content-length": str(len(reply.body)), "content-type": reply.content_type}
        await self._start(reply.status, {**headers, **reply.headers})
        await self._send({"type": "http.response.body", "body": reply.body})

    async def _send_stream(self, reply: StreamReply) -> None:
        chunks = reply.chunks
        # Nothing is said before something is known: until then an error has a status of its own.
        first = await anext(chunks)
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        await self._start(200, {**headers, "x-accel-buffering": "no", **reply.headers})
        await self._send_chunk(first)
        async for chunk in chunks:
            await self._send_chunk(chunk)
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_chunk(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        headers["x-request-id"] = self._call.request_id
        if self._call.warnings:
            headers["x-headrace-warning"] = "; ".join(self._call.warnings)
        raw = [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


class _ClientGone(Exception):
    pass
