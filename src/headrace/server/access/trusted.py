"""Keys of a replica behind a router on this host: the router has checked the client's key.

The router shows that it is the router by an internal key, and names the client's key in a header.
Limits were counted there; here a key has its name, its weight and a prefix cache of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

from headrace.server.access.keys import Keys
from headrace.server.access.limits import Key

KEY_HEADER = "x-headrace-key"
ROUTER_NAME = "default"  # operators.py: whoever has this one is the operator


class TrustedKeys(Keys):
    def __init__(self, internal: bytes, weights: Mapping[str, int]) -> None:
        """`internal` is the internal key's digest; `weights` are those of the clients' keys."""
        own = Key(name=ROUTER_NAME, digest=internal)
        named = [Key(name=name, digest=b"", weight=weight) for name, weight in weights.items()]
        super().__init__(_once([*named, own]))
        self._internal = Keys([own])
        self._names = frozenset(weights)
        self._has_tenants = len(weights) > 1

    def authenticate(self, headers: Mapping[str, str]) -> str | None:
        name = self._internal.authenticate(headers)
        sent = unquote(headers.get(KEY_HEADER, ""))
        return sent if sent in self._names else name

    def cache_salt(self, key_name: str | None, sent: str) -> str:
        return super().cache_salt(key_name, sent) if self._has_tenants else sent


def named_in_header(name: str) -> bytes:
    """A key's name may be any text; a header's value may not."""
    return quote(name, safe="").encode("ascii")


def _once(keys: Sequence[Key]) -> list[Key]:
    """The first of each name: a client's key may have the router's."""
    return list({key.name: key for key in reversed(keys)}.values())
