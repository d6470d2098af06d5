"""Requests from web pages: CORS for allowed origins, a refusal for all others.

A web page can make its reader's browser send requests to any address that the browser reaches,
127.0.0.1 included. A server with keys is safe, since the page has none. Without keys three checks
keep pages out: the Origin, which a browser always sends with a POST, must be allowed or the
server's own; the Host must be a name that no stranger can point here (DNS rebinding); and the
Content-Type must be JSON, which a page can't send to another origin without a preflight request.
Programs send no Origin and are not affected. Knows headers; not what is asked or answered.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

from headrace.core.errors import HeadraceError
from headrace.core.server_config import ANY, ServerConfig
from headrace.server.api.route import Route
from headrace.server.edge.listen import is_loopback
from headrace.server.request.body import MediaTypeError
from headrace.server.request.call import AnyReply, Call, Reply
from headrace.server.request.service import Service

PREFLIGHT_MAX_AGE_S = 3600
METHODS = "GET, HEAD, POST, DELETE"
USUAL_HEADERS = "authorization, content-type, x-api-key"

_JSON = re.compile(r"application/(?:[a-z0-9!#$&^_.+-]+\+)?json", re.ASCII)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
# Domains that can't be registered in public DNS (RFC 6761; .internal is for private use).
# Containers call the machine they run on host.docker.internal.
_PRIVATE = (".localhost", ".internal")
# A neighbour in the local network can answer for these (mDNS); a server that listens to the network
# is open to its neighbours anyway.
_NEIGHBOURS = (".local", ".home.arpa")
_BARE_NAME = re.compile(r"[a-z0-9_-]+")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class ForbiddenError(HeadraceError):
    """A web page's origin, or a Host name, that was not allowed."""

    status = 403


class Browsers:
    def __init__(self, config: ServerConfig, host: str, *, has_keys: bool) -> None:
        """`host` is what is listened on."""
        self._origins = frozenset(config.cors_origin)
        self._hosts = frozenset(config.allowed_host)
        self._has_keys = has_keys
        self._is_local = is_loopback(host)
        self._own_names = {host.lower(), socket.gethostname().lower()}

    def mark(self, call: Call) -> None:
        """CORS headers for any answer, errors too: without them a page may not read it."""
        if not self._origins:
            return
        if ANY not in self._origins:
            call.reply_headers["vary"] = "Origin"
        if self._allows(origin := call.headers.get("origin")):
            call.reply_headers["access-control-allow-origin"] = (
                ANY if ANY in self._origins else str(origin)
            )
            call.reply_headers["access-control-expose-headers"] = "*"

    def preflight(self, call: Call) -> Route | None:
        """Answers a preflight request, which has no key. The answer is the same for every path, so
        that it does not reveal which paths exist."""
        headers = call.headers
        asked = "origin" in headers and "access-control-request-method" in headers
        if call.method != "OPTIONS" or not asked:
            return None
        if not self._allows(headers["origin"]):
            raise _foreign(headers["origin"])
        call.route = _PREFLIGHT.path
        return _PREFLIGHT

    def check(self, call: Call, route: Route) -> None:
        self.check_headers(
            call.headers, is_open=route.is_open, takes_body=route.request is not None
        )

    def check_headers(self, headers: Mapping[str, str], *, is_open: bool, takes_body: bool) -> None:
        if not self._has_keys and not is_open:
            self._check_host(headers)
            self._check_origin(headers)
        if takes_body:
            _check_content_type(headers)

    def _allows(self, origin: str | None) -> bool:
        return origin is not None and (ANY in self._origins or origin in self._origins)

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        origin = headers.get("origin")
        if origin is None or self._allows(origin):
            return
        scheme, _, authority = origin.partition("://")
        own = headers.get("host", "").lower()
        if not own or own != authority.removesuffix(_DEFAULT_PORTS.get(scheme, "")):
            raise _foreign(origin)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        sent = headers.get("host", "")  # empty: HTTP/1.0, which no browser speaks
        if sent and ANY not in self._hosts and not self._knows_host(_host_of(sent)):
            raise ForbiddenError(
                f"The Host header is {sent[:200]!r}, which is not a name of this server, and no "
                "key is set.",
                f"If you reach it by that name, start it with --allowed-host {_shown(sent)}, or "
                "set a key.",
            )

    def _knows_host(self, name: str) -> bool:
        if name in self._hosts or name == "localhost" or name.endswith(_PRIVATE):
            return True
        if any(name.endswith(each[1:]) for each in self._hosts if each.startswith("*.")):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            pass
        else:
            return True  # an IP address can't be pointed elsewhere by DNS
        if self._is_local:
            return False
        is_bare = (
            _BARE_NAME.fullmatch(name) is not None
        )  # without a domain: resolved in the local network only
        return is_bare or name in self._own_names or name.endswith(_NEIGHBOURS)


def browser_warnings(config: ServerConfig, *, has_keys: bool) -> list[str]:
    """Warnings to show at the start."""
    if ANY in config.cors_origin and not has_keys:
        return [
            "--cors-origin * without a key: any web page opened on a machine that can reach this "
            "server may use it"
        ]
    return []


async def _answer_preflight(service: Service, call: Call) -> AnyReply:
    """What a page of an allowed origin may send."""
    return Reply(body=b"", status=204, headers=preflight_headers(call))


def preflight_headers(call: Call) -> dict[str, str]:
    asked = call.headers.get("access-control-request-headers", "").strip()
    headers = {
        "access-control-allow-methods": METHODS,
        # Any header that it asks for: clients have their own (x-stainless-…), and a page that may
        # send the body may send those too.
        "access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else USUAL_HEADERS,
        "access-control-max-age": str(PREFLIGHT_MAX_AGE_S),
        "vary": "Origin, Access-Control-Request-Headers",
    }
    if call.headers.get("access-control-request-private-network") == "true":
        headers["access-control-allow-private-network"] = "true"
    call.reply_headers.pop("vary", None)
    return headers


_PREFLIGHT = Route(path="preflight", endpoint=_answer_preflight, methods=("OPTIONS",), is_open=True)


def _check_content_type(headers: Mapping[str, str]) -> None:
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    sent = headers.get("content-type")
    if not has_body or (sent is None and not {"origin", "sec-fetch-site"} & headers.keys()):
        return  # a program that sends no Content-Type can only mean JSON
    if _JSON.fullmatch((sent or "").partition(";")[0].strip().lower()):
        return
    remedy = "Send the header 'Content-Type: application/json'."
    if sent == "application/x-www-form-urlencoded":
        remedy = "Send the header 'Content-Type: application/json' (curl: -H, or --json for -d)."
    raise MediaTypeError(
        f"The body's Content-Type is {sent[:100]!r}; expected application/json."
        if sent is not None
        else "The body has no Content-Type; expected application/json.",
        remedy,
    )


def _foreign(origin: str) -> ForbiddenError:
    return ForbiddenError(
        f"The request comes from a web page of {origin[:200]!r}, which is not allowed to use this "
        "server.",
        f"If it may, start the server with --cors-origin {_shown(origin)}."
        if origin != "null"
        else "Serve the page from an origin of its own, and start the server with --cors-origin "
        "and that origin.",
    )


def _host_of(sent: str) -> str:
    """The name or address of a Host header, without a port."""
    text = sent.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _shown(sent: str) -> str:
    """Quoted for a command line that a reader may copy."""
    name = sent if "://" in sent else _host_of(sent)
    return name if re.fullmatch(r"[A-Za-z0-9.:/\[\]_+-]{1,200}", name) else "NAME"
