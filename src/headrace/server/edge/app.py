"""The ASGI application: finds the endpoint, reads the body, sends the answer, shapes errors.

A client that goes away cancels the endpoint wherever it is. Knows HTTP; not what is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.server_config import UnknownFields
from headrace.server.access.operators import Operators
from headrace.server.api.route import Route
from headrace.server.edge.bodies import ClientGone, read_body, too_large
from headrace.server.edge.browsers import Browsers
from headrace.server.edge.http_head import length_of
from headrace.server.observe.record import HttpRecord
from headrace.server.request.call import (
    Call,
    MethodError,
    NotFoundError,
    Reply,
    StreamReply,
    error_reply,
    request_id_of,
)
from headrace.server.request.service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CLIENT_GONE = 499  # nginx's status for it; only the log shows it

log = logging.getLogger(__name__)


class App:
    """The application of one port."""

    def __init__(self, service: Service, routes: list[Route], *, is_admin: bool = False) -> None:
        self._service = service
        self._operators = Operators(service.config, service.keys, is_admin=is_admin)
        host = service.config.admin_host if is_admin else service.config.host
        self._browsers = Browsers(service.config, host, has_keys=self._operators.needs_key)
        self._large_turn = asyncio.Lock()
        self._routes: dict[str, list[Route]] = {}  # by path; one route per method
        for route in routes:
            self._routes.setdefault(route.path, []).append(route)
        # The most specific first: an open part matches anything.
        self._open_ended = sorted((p for p in self._routes if "{" in p), key=len, reverse=True)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection; expected http")
        headers = _read_headers(scope["headers"])
        call = Call(
            method=scope["method"],
            path=scope["path"],
            headers=headers,
            request_id=request_id_of(headers),
            query=scope["query_string"].decode("latin-1"),
            refuses_unknown=self._service.config.unknown_fields is UnknownFields.REFUSE,
            large_turn=self._large_turn,
        )
        address = scope.get("client") or ("",)
        exchange = _Exchange(self._service, self._browsers, call, receive, send, str(address[0]))
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
            ignored_fields=call.ignored_fields,
        )
        for watcher in self._service.http_watchers:
            watcher.on_http(record)

    def _find(self, call: Call) -> Route:
        """Finds the route. Without a valid key a client does not even learn which paths exist."""
        routes = self._match(call.path)
        if routes:
            _take_shape(call, routes[0])
        self._operators.authenticate(call, routes[0] if routes else None)
        if not routes:
            raise NotFoundError(f"Unknown path {call.path[:200]!r}.", self._hint(call.path))
        call.route = routes[0].path
        by_method = {method: route for route in routes for method in route.methods}
        if "GET" in by_method:
            by_method.setdefault("HEAD", by_method["GET"])
        if call.method not in by_method:
            allowed = list(by_method)
            raise MethodError(
                f"{call.path[:200]} does not support {call.method}; expected {', '.join(allowed)}.",
                f"Send a {allowed[0]} request.",
                allowed,
            )
        return by_method[call.method]

    def _match(self, path: str) -> list[Route]:
        if path in self._routes and "{" not in path:
            return self._routes[path]
        for candidate in self._open_ended:
            if self._routes[candidate][0].matches(path):
                return self._routes[candidate]
        return []

    def _hint(self, path: str) -> str:
        near = difflib.get_close_matches(path[:200].rstrip("/"), self._routes, n=1, cutoff=0.8)
        if near:
            return f"Did you mean {near[0]}?"
        return "GET /openapi.json lists all paths."


class _Exchange:
    """One request and its answer over one pair of ASGI channels."""

    def __init__(
        self,
        service: Service,
        browsers: Browsers,
        call: Call,
        receive: Receive,
        send: Send,
        address: str,
    ) -> None:
        self._service = service
        self._browsers = browsers
        self._call = call
        self._receive = receive
        self._send = send
        self._address = address  # of the client
        self._is_sent = False  # the whole answer
        self.status = CLIENT_GONE

    async def answer(self, find: Callable[[Call], Route]) -> None:
        call = self._call
        try:
            self._browsers.mark(call)
            route = self._browsers.preflight(call) or find(call)
            self._browsers.check(call, route)
            self._check_content_length()
            await self._read_body()
            with self._service.keys.enter(call):
                await self._watched(self._run(route))
        except ClientGone:
            self.status = CLIENT_GONE
        except HeadraceError as error:
            await self._send_reply(self._failed(error))

    async def _run(self, route: Route) -> None:
        try:
            reply = await route.endpoint(self._service, self._call)
            if isinstance(reply, StreamReply):
                await self._send_stream(reply)
                return
        except HeadraceError as error:
            reply = self._failed(error)
        except Exception:
            reply = self._failed(self._own_fault())
        await self._send_reply(reply)

    def _failed(self, error: HeadraceError) -> Reply:
        # The traceback's frames refer to the call, and the call to the error: this cycle would keep
        # the body in memory until the garbage collector runs.
        error.__cause__ = error.__context__ = None
        self._call.error = error.with_traceback(None)
        return error_reply(error, self._call.error_shape, self._call.request_id)

    def _own_fault(self) -> HeadraceError:
        request_id = self._call.request_id
        log.exception("an endpoint failed", extra={"event": "fault", "request_id": request_id})
        return HeadraceError(
            "An unexpected error in the server.", f"Look for request id {request_id} in its log."
        )

    async def _watched(self, work: Awaitable[None]) -> None:
        """Run the endpoint, unless the client disconnects first."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        is_cut = True
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            is_cut = not task.done() and not self._is_sent
        finally:
            gone.cancel()
            if is_cut:
                task.cancel()
            await asyncio.wait(
                {task}
            )  # so that what the request held is released when this returns
        if is_cut:
            raise ClientGone
        task.result()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # -- in --------------------------------------------------------------------------------------

    def _check_content_length(self) -> None:
        """Refuses by the announced Content-Length, before anything is read."""
        most = self._service.config.max_body_bytes
        sent = length_of(self._call.headers.get("content-length", ""))
        if sent is not None and sent > most:
            raise too_large(f"The body has {sent} bytes; this server reads at most", most)

    async def _read_body(self) -> None:
        call, config = self._call, self._service.config
        call.body = await read_body(
            self._service.bodies,
            self._receive,
            owner=call.key_name or self._address,
            most=config.max_body_bytes,
            limit_s=config.client_timeout_s,
        )
        call.body_bytes = len(call.body)

    # -- out -------------------------------------------------------------------------------------

    async def _send_reply(self, reply: Reply) -> None:
        headers = {"content-length": str(len(reply.body)), "content-type": reply.content_type}
        if reply.status == 204:  # must have no body, not even an empty one
            headers = {}
        await self._start(reply.status, {**headers, **reply.headers})
        self._is_sent = True
        await self._send({"type": "http.response.body", "body": reply.body})

    async def _send_stream(self, reply: StreamReply) -> None:
        async with _closing(reply.chunks) as chunks:
            # Headers are sent with the first item: until then an error can have its own status.
            first = await anext(chunks, b"")
            headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
            await self._start(200, {**headers, "x-accel-buffering": "no", **reply.headers})
            await self._send_chunk(first)
            try:
                async for chunk in chunks:
                    await self._send_chunk(chunk)
            except HeadraceError as error:
                self._call.error = error
                await self._send_chunk(self._event(error))
            except Exception:
                self._call.error = self._own_fault()
                await self._send_chunk(self._event(self._call.error))
            self._is_sent = True
            await self._send({"type": "http.response.body", "body": b""})

    def _event(self, error: HeadraceError) -> bytes:
        return self._call.error_shape.event(error, self._call.request_id)

    async def _send_chunk(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        call = self._call
        headers.update(call.reply_headers)
        headers["x-request-id"] = call.request_id
        if self._service.fingerprint:
            headers["x-headrace-fingerprint"] = self._service.fingerprint
        if call.warnings:
            headers["x-headrace-warning"] = call.warning_header()
        raw = [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def _take_shape(call: Call, route: Route) -> None:
    call.error_shape = route.error_shape
    if route.error_shape.id_header is not None:
        call.reply_headers[route.error_shape.id_header] = call.request_id


@contextlib.asynccontextmanager
async def _closing(chunks: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    """Closes a generator that is not read any further: it holds an engine request, which must not
    wait for the garbage collector."""
    try:
        yield chunks
    finally:
        if close := getattr(chunks, "aclose", None):
            await close()


def _read_headers(sent: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """A header sent twice becomes one joined value, as HTTP says: no client can send two keys."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in sent:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
