"""What users of one server expect of several: the router with a server's other paths and checks.

Adds to router.py: /restart; the checks on web pages and names; the client's key by name, for the
replica's turns and log; stored responses, which live on one replica; the page and its data; all
replicas' metrics in one answer. Knows slots and rolls; no processes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.server_config import ServerConfig
from headrace.core.version import headrace_version
from headrace.policies.routing import Wanted
from headrace.replicas.fleet import RollingFleet
from headrace.replicas.release import change
from headrace.replicas.roll import Roller
from headrace.replicas.shown import scrape_all, show_all, sum_load
from headrace.replicas.slot import Slot
from headrace.router.asked import Asked
from headrace.router.exchange import Exchange, Way
from headrace.router.front import ClientConnection
from headrace.router.heartbeat import Get
from headrace.router.metrics import CONTENT_TYPE, write_metrics
from headrace.router.replica import Replica
from headrace.router.request import Request, passed_headers
from headrace.router.router import (
    MethodError,
    NotFoundError,
    OperatorOnlyError,
    Router,
)
from headrace.router.settings import RouterSettings
from headrace.server.access.keys import API_KEY_NAME, Keys
from headrace.server.access.trusted import KEY_HEADER, named_in_header
from headrace.server.edge.browsers import Browsers, preflight_headers
from headrace.server.request.call import Call

RESTART, METRICS, LOAD, VERSION = "/restart", "/metrics", "/load", "/version"
STORED = "/v1/responses/"
RESPONSES = "/v1/responses"
OPEN_PAGES = frozenset({"/"})
ONE_REPLICAS = frozenset({"/history", "/diagnosis", "/fit"})  # for operators: of one replica
ANY_REPLICAS = frozenset({"/openapi.json"})
BACK_S = 60.0  # how long a request waits for the replica that has what it names
LOOK_S = 0.02
_ID = re.compile(r"resp_r(\d{1,3})_")
_REPLICA = re.compile(r"(?:^|&)replica=(\d{1,3})(?:&|$)")

log = logging.getLogger(__name__)


class _Named(msgspec.Struct):
    previous_response_id: Any = None


class Restart(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /restart: nothing for a plain restart."""

    model: str | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


_named = msgspec.json.Decoder(_Named).decode
_restart = msgspec.json.Decoder(Restart).decode


class ReplicasRouter(Router):
    fleet: RollingFleet

    def __init__(
        self,
        fleet: RollingFleet,
        settings: RouterSettings,
        *,
        config: ServerConfig,
        keys: Keys,
        slots: Sequence[Slot],
        roller: Roller,
        scrape: Callable[[Replica], Get],
    ) -> None:
        super().__init__(fleet, settings, keys=keys)
        self._slots, self.roller, self._scrape = slots, roller, scrape
        self._has_admin = config.admin_port is not None
        self._browsers = Browsers(config, config.host, has_keys=len(keys) > 0)

    # -- front.Handler ---------------------------------------------------------------------------

    def handle(self, client: ClientConnection, request: Request) -> asyncio.Task[None] | None:
        self._name_key(request, None)  # only this process names one
        try:
            if self._from_a_page(client, request):
                return None
            own = self._own(client, request)
        except HeadraceError as error:
            self.counts.answers["", error.status] += 1
            client.refuse(error.with_traceback(None))
            return None
        if own is None:
            return super().handle(client, request)
        return asyncio.create_task(self._guarded(client, own))

    def _own(self, client: ClientConnection, request: Request) -> Coroutine[Any, Any, None] | None:
        """For paths that a plain router does not have."""
        path = request.path
        if path in OPEN_PAGES:
            return self._pass_on(client, request, None)
        if path in (RESTART, METRICS, LOAD) or path in ONE_REPLICAS:
            self._check_operator(request)
            self._check_method(request, "POST" if path == RESTART else "GET")
            if path == RESTART:
                return self._restart(client, request)
            if path == METRICS:
                return self._metrics(client)
            if path == LOAD:
                return self._load(client)
            return self._pass_on(client, request, self._chosen(request))
        if path == VERSION and request.method in (b"GET", b"HEAD"):
            return self._versions(client, request)
        if path in ANY_REPLICAS or path.startswith(STORED):
            key_name = self.keys.authenticate(request.texts)
            self._name_key(request, key_name)
            if path in ANY_REPLICAS:
                return self._pass_on(client, request, None)
            return self._stored(client, request, path.removeprefix(STORED))
        if path == RESPONSES and request.method == b"POST":
            try:
                named = _named(request.body).previous_response_id
            except (msgspec.DecodeError, RecursionError):
                named = None
            if isinstance(named, str) and (slot := self._slot_of(named)) is not None:
                key_name = self.keys.authenticate(request.texts)
                return self._continued(client, request, key_name, slot)
        return None

    async def _guarded(self, client: ClientConnection, own: Coroutine[Any, Any, None]) -> None:
        try:
            await own
        except HeadraceError as error:
            self.counts.answers["", error.status] += 1
            client.refuse(error.with_traceback(None))

    def _check_method(self, request: Request, wanted: str) -> None:
        if request.method.decode("latin-1") not in (wanted, "HEAD" if wanted == "GET" else wanted):
            raise MethodError(
                f"{request.path} does not support {request.method.decode('latin-1')}.",
                f"Send a {wanted} request.",
            )

    # -- web pages and names, as server/edge/app.py has it ---------------------------------------

    def _from_a_page(self, client: ClientConnection, request: Request) -> bool:
        """Raises for pages and names that are not allowed. True: it was a preflight request, and
        has its answer."""
        call = Call(
            method=request.method.decode("latin-1"),
            path=request.path,
            headers=request.texts,
            request_id=request.request_id,
        )
        browsers = self._browsers
        browsers.mark(call)
        self._mark(client, call)
        if browsers.preflight(call) is not None:
            headers = preflight_headers(call)
            self._mark(client, call)
            client.reply(204, b"text/plain", b"", tuple(_encoded(headers)))
            return True
        is_open = request.path in OPEN_PAGES or request.path in ("/health", "/ready", "/ping")
        browsers.check_headers(call.headers, is_open=is_open, takes_body=request.method == b"POST")
        return False

    def _mark(self, client: ClientConnection, call: Call) -> None:
        client.reply_headers = tuple(_encoded(call.reply_headers))

    # -- operators -------------------------------------------------------------------------------

    def _check_operator(self, request: Request) -> None:
        """As server/access/operators.py has it: the operators' key, else --api-key, else the only
        key there is."""
        if request.is_admin and not self.settings.operator_key:
            if request.method == b"POST" and "origin" in request.texts:
                raise OperatorOnlyError(
                    f"{request.path} is not for web pages.", "Send it from a program."
                )
            return
        if self._has_admin and len(self.keys) and not request.is_admin:
            raise NotFoundError(
                f"{request.path} is not served on this port.", "Use the port set by --admin-port."
            )
        if not self.settings.operator_key and len(self.keys):
            name = self.keys.authenticate(request.texts)
            if name == API_KEY_NAME or len(self.keys) == 1:
                return
        super()._check_operator(request)

    async def _restart(self, client: ClientConnection, request: Request) -> None:
        try:
            asked = _restart(request.body or b"{}")
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequestError(
                f"The body is not what was expected: {error}.",
                'Send {}, or {"model": "…", "settings": {"max_sequences": 32}}.',
            ) from None
        roller = self.roller
        roller.check()
        changes = asked.model is not None or bool(asked.settings)
        release = change(roller.release, asked.model, asked.settings) if changes else None
        progress = await roller.begin(release)
        self._json(client, {"roll": progress.facts()})

    def _operate(self, client: ClientConnection, request: Request) -> None:
        if request.path == "/replicas" and request.method in (b"GET", b"HEAD"):
            self._json(client, self.facts())
            return
        super()._operate(client, request)

    def facts(self) -> dict[str, object]:
        return show_all(self._slots, self.replica_facts(), self.roller.progress)

    async def _metrics(self, client: ClientConnection) -> None:
        """The router's own, then every replica's, each sample with the replica's number."""
        own = write_metrics(self.counts, self.fleet, self.open_connections())
        theirs = await scrape_all(self._slots, self.fleet, self._scrape)
        client.reply(200, CONTENT_TYPE.encode(), (own + theirs).encode())

    async def _load(self, client: ClientConnection) -> None:
        self._json(client, sum_load(self.fleet))

    async def _versions(self, client: ClientConnection, request: Request) -> None:
        """A replica's, with its settings for operators; to others version and fingerprint."""
        try:
            self._check_operator(request)
        except HeadraceError:
            self.keys.authenticate(request.texts)
            prints = [name for name, group in self.fleet.groups.items() if group.replicas]
            found = {"version": headrace_version(), "fingerprint": ", ".join(prints)}
            self._json(client, found)
            return
        await self._pass_on(client, request, self._chosen(request))

    # -- one replica's ---------------------------------------------------------------------------

    def _chosen(self, request: Request) -> Slot | None:
        """?replica=2; without it the first that takes requests."""
        query = request.target.partition(b"?")[2].decode("latin-1")
        if (found := _REPLICA.search(query)) is None:
            return next((slot for slot in self._slots if slot.takes_requests), None)
        cleaned = _REPLICA.sub("&", query).strip("&")
        request.target = (request.path + (f"?{cleaned}" if cleaned else "")).encode("latin-1")
        return self._slot(int(found[1]))

    def _slot(self, number: int) -> Slot:
        if not 0 < number <= len(self._slots):
            raise NotFoundError(
                f"There is no replica {number}; they are 1 to {len(self._slots)}.",
                "GET /replicas lists them.",
            )
        return self._slots[number - 1]

    def _slot_of(self, response_id: str) -> Slot | None:
        found = _ID.match(response_id)
        number = int(found[1]) if found else 0
        return self._slots[number - 1] if 0 < number <= len(self._slots) else None

    def _find_stored(self, request: Request, asked: Asked, way: Way, key_name: str | None) -> None:
        """Nothing: here an id says which replica has the answer, and that one knows whose it is."""

    async def _stored(self, client: ClientConnection, request: Request, rest: str) -> None:
        slot = self._slot_of(rest)
        if slot is None:
            shown = rest.partition("/")[0][:100]
            raise NotFoundError(f"There is no response {shown!r} stored here.")
        await self._wait_for(slot)
        await self._pass_on(client, request, slot)

    async def _continued(
        self, client: ClientConnection, request: Request, key_name: str | None, slot: Slot
    ) -> None:
        await self._wait_for(slot)
        request.pinned = slot.address.url
        await self._forward(client, request, key_name)

    async def _wait_for(self, slot: Slot) -> None:
        """While it restarts: it takes its stored responses with it."""
        end_s = time.monotonic() + BACK_S
        while not slot.takes_requests and slot.state != "stopped" and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)

    async def _pass_on(self, client: ClientConnection, request: Request, slot: Slot | None) -> None:
        """A request without a prompt, to one replica or to any."""
        version = ""
        if slot is not None:
            version = self.fleet.one_at(slot.address.url)
        headers = passed_headers(
            request, drops_keys=len(self.keys) > 0, internal_key=self.settings.internal_key
        )
        way = Way(
            wanted=Wanted(prompt_tokens=1),
            version=version,
            headers=headers,
            stays=slot is not None,
        )
        self.counts.open_requests += 1
        client.on_end = self._one_less
        await Exchange(self.fleet, self.settings, self.counts, client, request, way).run()

    # -- what goes to a replica ------------------------------------------------------------------

    def _forward(
        self, client: ClientConnection, request: Request, key_name: str | None
    ) -> asyncio.Task[None]:
        self._name_key(request, key_name)
        return super()._forward(client, request, key_name)

    def _name_key(self, request: Request, key_name: str | None) -> None:
        header = KEY_HEADER.encode("latin-1")
        request.headers = [each for each in request.headers if each[0] != header]
        if key_name is not None:
            request.headers.append((header, named_in_header(key_name)))

    def _version(self, request: Request, asked: Asked, session: str | None) -> str:
        if request.pinned:
            return self.fleet.one_at(request.pinned)
        return super()._version(request, asked, session)


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers.items()]
