"""A client's request as it was read, and as it goes to a replica. Knows HTTP alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.client.connection import Address

# Of one connection; or written anew for the replica.
_NOT_PASSED = frozenset(
    {
        *(b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer"),
        *(b"transfer-encoding", b"content-length", b"upgrade", b"expect", b"http2-settings"),
        *(b"proxy-authorization", b"x-request-id", b"x-forwarded-for", b"x-headrace-prefill"),
    }
)
_KEYS = frozenset({b"authorization", b"x-api-key"})


@dataclass(slots=True, kw_only=True)
class Request:
    method: bytes
    target: bytes  # the path and what follows it, as sent
    path: str
    version: str  # of HTTP
    keep_alive: bool
    headers: list[tuple[bytes, bytes]]  # names in lower case
    arrived_s: float  # by time.perf_counter: when its last byte came
    body: bytes = b""
    request_id: str = ""
    client_host: str = ""
    is_admin: bool = False  # it came to a port for operators
    pinned: str = ""  # the URL of the replica that alone can answer; empty: any
    _texts: dict[str, str] | None = field(default=None, repr=False)

    @property
    def texts(self) -> dict[str, str]:
        """The headers as text. One that was sent twice is joined: no client can send two keys."""
        if self._texts is None:
            found: dict[str, str] = {}
            for raw_name, raw_value in self.headers:
                name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
                found[name] = f"{found[name]}, {value}" if name in found else value
            self._texts = found
        return self._texts


def passed_headers(request: Request, *, drops_keys: bool, internal_key: str | None) -> bytes:
    """The header lines that every replica gets, the same for each try."""
    connection = {
        part.strip().lower()
        for name, value in request.headers
        if name == b"connection"
        for part in value.split(b",")
    }
    lines = []
    came_by = []
    for name, value in request.headers:
        if name == b"x-forwarded-for":
            came_by.append(value)
        if name in _NOT_PASSED or name in connection:
            continue
        if name in _KEYS and (drops_keys or internal_key is not None):
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    if internal_key is not None:
        lines.append(b"authorization: Bearer %b\r\n" % internal_key.encode("latin-1"))
    lines.append(b"x-request-id: %b\r\n" % request.request_id.encode("latin-1"))
    if request.client_host:
        came_by.append(request.client_host.encode("latin-1"))
        lines.append(b"x-forwarded-for: %b\r\n" % b", ".join(came_by))
    return b"".join(lines)


def request_bytes(address: Address, request: Request, headers: bytes) -> bytes:
    host = f"[{address.host}]" if ":" in address.host else address.host
    length = b""
    if request.body or request.method in (b"POST", b"PUT", b"PATCH"):
        length = b"content-length: %d\r\n" % len(request.body)
    return b"%b %b%b HTTP/1.1\r\nhost: %b:%d\r\n%b%b\r\n%b" % (
        request.method,
        address.path.encode("latin-1", "replace"),
        request.target,
        host.encode("latin-1", "replace"),
        address.port,
        length,
        headers,
        request.body,
    )
