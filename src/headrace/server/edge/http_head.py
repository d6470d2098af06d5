"""Checks of a request's head: target, Host, length of the body.

Beyond what the parser checks. Raises the parser's own error, which http.py answers with 400.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools

RawHeaders = list[tuple[bytes, bytes]]

MOST_DIGITS = 18  # no real body is longer
# A name or an address, and a port; RFC 9110 allows it to be empty.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")


def check_host(version: str, headers: RawHeaders) -> None:
    """RFC 9112, 3.2: exactly one valid Host header; HTTP/1.0 may have none."""
    found = [value for name, value in headers if name == b"host"]
    if len(found) > 1:
        raise httptools.HttpParserError(f"{len(found)} Host headers, where one is expected")
    if not found and version == "1.1":
        raise httptools.HttpParserError("no Host header, which HTTP/1.1 requires")
    if found and not _HOST.fullmatch(found[0].strip(b" \t")):
        raise httptools.HttpParserError("a Host header that is neither a name nor an address")


def set_target(scope: Any, url: Any) -> None:
    if url.path is None:
        raise httptools.HttpParserError("no path")
    scope["raw_path"] = url.path
    scope["path"] = unquote_to_bytes(url.path).decode("utf-8", "replace")
    scope["query_string"] = url.query or b""


def length_of(text: str) -> int | None:
    """Parses a Content-Length, with any number of leading zeros; None where it is invalid."""
    if not text.isascii() or not text.isdigit():
        return None
    digits = text.lstrip("0")
    return int(digits or "0") if len(digits) <= MOST_DIGITS else int("9" * MOST_DIGITS)


def upgrade_body_bytes(headers: RawHeaders) -> int:
    """Java's client, for one, asks for h2c with a body; the parser does not deliver that body."""
    for name, value in headers:
        if name == b"transfer-encoding":
            raise httptools.HttpParserError("an upgrade with a chunked body")
        if name == b"content-length":
            return length_of(value.decode("latin-1").strip()) or 0
    return 0
