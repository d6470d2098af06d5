"""Keeps the prefix caches of the router's keys apart, though replicas see one key.

Headrace, vLLM and SGLang compute a `cache_salt` into their prefix cache: what one salt cached,
another does not find, so that no timing reveals somebody else's prompt. Knows JSON text and keys.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

# Those of Headrace that take the field.
SALTED = frozenset(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "embeddings", "messages", "responses")
)


class Salts:
    def __init__(self, internal_key: str | None) -> None:
        """By the internal key, so that several routers give the same salt."""
        seed = secrets.token_bytes(32) if internal_key is None else internal_key.encode()
        self._secret = hashlib.sha256(b"headrace router salt\0" + seed).digest()

    def salted(self, body: bytes, key_name: str, *, has_salt: bool) -> bytes:
        """A JSON object with the salt of a key. One that the client sent becomes part of it."""
        if has_salt:
            value = msgspec.json.decode(body)
            value["cache_salt"] = self._salt(key_name, str(value["cache_salt"]))
            return msgspec.json.encode(value)
        start = body.index(b"{") + 1
        comma = b"" if body[start:].lstrip().startswith(b"}") else b","
        field = b'"cache_salt":"%b"' % self._salt(key_name, "").encode()
        return b"".join([body[:start], field, comma, body[start:]])

    def _salt(self, key_name: str, sent: str) -> str:
        text = f"{key_name}\0{sent}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()
