"""What happens with a request: the router's own pages, refusals, and the way to a replica.

Knows keys, paths and the fleet; front.py reads and writes, exchange.py talks with replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from headrace.core.errors import (
    AuthenticationError,
    HeadraceError,
    InvalidRequestError,
    UnavailableError,
)
from headrace.core.version import headrace_version
from headrace.policies.routing import key_of
from headrace.router.asked import Asked, read_asked
from headrace.router.exchange import Exchange, Way
from headrace.router.fleet import Fleet
from headrace.router.front import ClientConnection
from headrace.router.metrics import CONTENT_TYPE, Counts, write_metrics
from headrace.router.prefill import Prefills
from headrace.router.request import Request, passed_headers
from headrace.router.salt import SALTED, Salts
from headrace.router.settings import RouterSettings
from headrace.router.shadow import Shadows
from headrace.router.stored import PATH as STORED_PATH
from headrace.router.stored import Stored
from headrace.server.access.keys import Keys
from headrace.server.access.limits import Cost, Reservation
from headrace.server.edge.listen import is_loopback

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
OPERATORS_PATHS = frozenset({"/metrics", "/replicas", "/drain", "/undrain"})
MODELS_PATH = "/v1/models"
_JSON = b"application/json"


class NotFoundError(HeadraceError):
    status = 404


class MethodError(HeadraceError):
    status = 405


class OperatorOnlyError(HeadraceError):
    status = 403


@dataclass(slots=True, kw_only=True)
class _Call:
    """What server/access/keys.py needs to know of a request."""

    method: str
    key_name: str | None
    reply_headers: dict[str, str] = field(default_factory=dict)
    reservation: Reservation | None = None


class Router:
    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        *,
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
        prefills: Prefills | None = None,
    ) -> None:
        self.fleet, self.settings = fleet, settings
        self.prefills = prefills
        self.counts = Counts()
        self.keys = keys or Keys()
        self.is_draining = False
        self.open_connections: Callable[[], int] = lambda: 0
        self._clock = clock
        self._salts = Salts(settings.internal_key)
        self.stored = Stored()
        self.shadows = Shadows(fleet, settings, self.counts)
        self._operator = settings.operator_key and settings.operator_key.encode("utf-8")

    # -- front.Handler ---------------------------------------------------------------------------

    def handle(self, client: ClientConnection, request: Request) -> asyncio.Task[None] | None:
        try:
            if request.path in OPEN_PATHS:
                self._health(client, request)
                return None
            if request.path in OPERATORS_PATHS:
                self._check_operator(request)
                self._operate(client, request)
                return None
            key_name = self.keys.authenticate(request.texts)
            if request.path.startswith((MODELS_PATH, "/version")) and request.method != b"POST":
                self._tell(client, request)
                return None
            if request.path not in self.settings.paths and not self._is_stored(request):
                raise NotFoundError(
                    f"The router does not pass {request.path[:200]!r} on.",
                    "Paths of replicas are opened with --path.",
                )
            return self._forward(client, request, key_name)
        except HeadraceError as error:
            self.counts.answers["", error.status] += 1
            client.refuse(error.with_traceback(None))
            return None

    def _is_stored(self, request: Request) -> bool:
        """/v1/responses/ID, and what is below it, for whoever may ask for new ones."""
        is_below = request.path.startswith(f"{STORED_PATH}/") and len(request.path) < 256
        return is_below and STORED_PATH in self.settings.paths

    def _forward(
        self, client: ClientConnection, request: Request, key_name: str | None
    ) -> asyncio.Task[None]:
        if self.is_draining:
            raise UnavailableError(
                "The router is shutting down.", "Send the request again.", retry_after_s=1.0
            )
        asked = read_asked(request.body, self.settings.prefix_bytes)
        self._enter_key(client, request, key_name, asked)
        session = request.texts.get(self.settings.session_header) or asked.user
        if key_name is not None and len(self.keys) > 1:
            asked = self._keep_apart(request, asked, key_name)
        headers = passed_headers(
            request, drops_keys=len(self.keys) > 0, internal_key=self.settings.internal_key
        )
        wanted = self.fleet.wanted(asked, session)
        version = self._version(request, asked, session)
        way = Way(wanted=wanted, version=version, headers=headers)
        chosen = None if self.prefills is None else self.prefills.choose(asked, wanted)
        if chosen is not None:
            way.headers, way.on_begin = headers + chosen[0], chosen[1]
        if request.path.startswith(STORED_PATH):
            self._find_stored(request, asked, way, key_name)
        if version and version in self.fleet.groups:
            client.reply_headers = (
                *client.reply_headers,
                (b"x-headrace-version", version.encode("latin-1")),
            )
        exchange = Exchange(self.fleet, self.settings, self.counts, client, request, way)
        task = asyncio.create_task(exchange.run())
        if (on_begin := way.on_begin) is not None:  # where nothing begins
            task.add_done_callback(lambda _: on_begin())
        if self.fleet.has_shadows:
            self.shadows.copy(request, wanted, headers)
        return task

    def _version(self, request: Request, asked: Asked, session: str | None) -> str:
        return self.fleet.version_for(asked, session)

    def _keep_apart(self, request: Request, asked: Asked, key_name: str) -> Asked:
        """Keys share no prefixes: neither in a replica's cache nor by where they go."""
        if asked.is_object and request.path in SALTED:
            request.body = self._salts.salted(request.body, key_name, has_salt=asked.has_salt)
        apart = tuple((key_of(key_name, key), tokens) for key, tokens in asked.prefixes)
        return replace(asked, prefixes=apart)

    def _find_stored(self, request: Request, asked: Asked, way: Way, key_name: str | None) -> None:
        """The way to the replica that has what a request continues, or asks for."""
        is_new = request.path == STORED_PATH
        wanted = asked.previous if is_new else request.path.split("/")[3]
        if is_new:
            way.stored, way.owner = self.stored, key_name
        if wanted:
            way.home = self.stored.find(wanted, key_name)
            way.searches = way.home is None

    # -- keys ------------------------------------------------------------------------------------

    def _enter_key(
        self, client: ClientConnection, request: Request, key_name: str | None, asked: Asked
    ) -> None:
        """Counts a request against its key's limits until it is over. Tokens are estimated, and
        stay spent if an answer began: the router does not read answers."""
        counts = self.counts
        if key_name is None:
            counts.open_requests += 1
            client.on_end = self._one_less
            return
        call = _Call(method=request.method.decode("latin-1"), key_name=key_name)
        entered = self.keys.enter(call)
        try:
            entered.__enter__()
            try:
                self._reserve(call, asked)
            except BaseException:
                entered.__exit__(None, None, None)
                raise
        finally:
            client.reply_headers += tuple(
                (n.encode("latin-1"), v.encode("latin-1")) for n, v in call.reply_headers.items()
            )
        counts.open_requests += 1

        def end() -> None:
            self._one_less()
            if call.reservation is not None and client.has_begun:
                call.reservation.tokens = 0
            entered.__exit__(None, None, None)

        client.on_end = end

    def _reserve(self, call: _Call, asked: Asked) -> None:
        use = self.keys.use_of(call.key_name)
        if use is None or call.method != "POST":
            return
        cost = Cost(
            continuations=asked.continuations,
            prompt_tokens=asked.prompt_tokens,
            asked_tokens=asked.output_tokens * asked.continuations,
            guessed_tokens=0,
        )
        now_s = self._clock()
        try:
            call.reservation = use.reserve(cost, asked.continuations, now_s)
        finally:
            call.reply_headers.update(use.headers(now_s))

    def _one_less(self) -> None:
        self.counts.open_requests -= 1

    def _check_operator(self, request: Request) -> None:
        if self._operator:
            scheme, _, sent = request.texts.get("authorization", "").partition(" ")
            digests = [
                hashlib.sha256(each).digest()
                for each in (sent.strip().encode("latin-1", "replace"), self._operator)
            ]
            if scheme.lower() == "bearer" and hmac.compare_digest(*digests):
                return
            raise AuthenticationError(
                f"{request.path} needs the operators' key.",
                "Send it as the header 'Authorization: Bearer KEY'.",
            )
        if len(self.keys):
            raise OperatorOnlyError(
                f"{request.path} is for operators, and the router has no key for them.",
                "Start it with --operator-key-variable.",
            )
        # A change without a key: only from this machine, and not from a web page.
        if request.method == b"POST" and (
            not is_loopback(request.client_host) or "origin" in request.texts
        ):
            raise OperatorOnlyError(
                f"{request.path} without a key is only for this machine.",
                "Start the router with --operator-key-variable.",
            )

    # -- the router's own pages ------------------------------------------------------------------

    def _health(self, client: ClientConnection, request: Request) -> None:
        if request.path == "/health":
            self._json(client, {"status": "ok"})
            return
        if self.is_draining:
            raise UnavailableError("The router is shutting down.", retry_after_s=1.0)
        if not self.fleet.takes_requests():
            raise UnavailableError("No replica takes requests now.", retry_after_s=1.0)
        self._json(client, {"ready": True})

    def _operate(self, client: ClientConnection, request: Request) -> None:
        changes = request.path in ("/drain", "/undrain")
        if (request.method == b"POST") is not changes:
            raise MethodError(
                f"{request.path} does not support {request.method.decode('latin-1')}.",
                f"Send a {'POST' if changes else 'GET'} request.",
            )
        if request.path == "/metrics":
            text = write_metrics(self.counts, self.fleet, self.open_connections())
            if self.prefills is not None:
                text += "\n".join([*self.prefills.metrics(), ""])
            client.reply(200, CONTENT_TYPE.encode(), text.encode())
            return
        if changes:
            self._drain(request)
        self._json(client, {"replicas": self.replica_facts()})

    def _drain(self, request: Request) -> None:
        """{"replica": URL}: takes no new requests until /undrain; those that run go on."""
        try:
            url = msgspec.json.decode(request.body, type=dict[str, str])["replica"]
        except (msgspec.DecodeError, KeyError):
            raise InvalidRequestError(
                "The body names no replica.", 'Send {"replica": "http://HOST:PORT"}.'
            ) from None
        found = (fleet.find(url.rstrip("/")) for fleet in self._fleets())
        replica = next((each for each in found if each is not None), None)
        if replica is None:
            raise NotFoundError(
                f"{url[:200]!r} is no replica of this router.", "GET /replicas lists them."
            )
        replica.is_draining = request.path == "/drain"
        logging.getLogger(__name__).info(
            "%s %s", replica.url, "is drained" if replica.is_draining else "takes requests again"
        )

    def replica_facts(self) -> list[dict[str, object]]:
        return [
            {
                "url": replica.url,
                "version": group.version.name,
                "state": replica.state,
                "why": replica.why_out or replica.kept_out or None,
                "models": None if replica.identity is None else list(replica.identity.models),
                "fingerprint": None if replica.identity is None else replica.identity.fingerprint,
                "running": replica.running,
                "pending_tokens": replica.pending_tokens,
                "failures": replica.failures,
                "ejections": replica.ejections,
                "load": replica.load or None,
            }
            for fleet in self._fleets()
            for group in fleet.groups.values()
            for replica in group.replicas.values()
        ]

    def _fleets(self) -> list[Fleet]:
        return [self.fleet] if self.prefills is None else [self.fleet, self.prefills.fleet]

    def _tell(self, client: ClientConnection, request: Request) -> None:
        if request.path == "/version":
            self._json(client, {"version": headrace_version(), "router": True})
            return
        cards: dict[str, dict[str, object]] = {}
        for group in self.fleet.groups.values():
            if group.version.shadow is None and group.identity is not None:
                for card in group.identity.cards:
                    cards.setdefault(str(card.get("id", "")), card)
        name = request.path.removeprefix(MODELS_PATH).removeprefix("/")
        if not name:
            self._json(client, {"object": "list", "data": list(cards.values())})
        elif name in cards:
            self._json(client, cards[name])
        else:
            raise NotFoundError(f"No replica serves {name[:200]!r}.", "GET /v1/models lists all.")

    def _json(self, client: ClientConnection, value: object) -> None:
        client.reply(200, _JSON, msgspec.json.encode(value))
