"""What went wrong with an endpoint, in one line each: what it did, and what to try.

Words only: endpoint.py meets these, report.py prints them. Knows statuses, content types and the
errors of sockets; asks nothing.
"""

from __future__ import annotations

import http.client
import ssl

_SHOWN = 60
_TLS_RECORDS = ("\x15\x03", "\x16\x03")  # how an alert or a handshake begins
SILENT = ("ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError", "RemoteDisconnected")


def unreachable(host: str, error: BaseException) -> tuple[str, str]:
    """Cause and remedy, where no reply came."""
    what = " ".join((str(error) or type(error).__name__).split())
    if isinstance(error, ssl.SSLError):
        if error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_MESSAGE", "HTTP_REQUEST"):
            return f"{host} speaks no TLS: {what}.", "Give http:// instead of https://."
        remedy = "Check the certificate: its name, its date, and who signed it ($SSL_CERT_FILE)."
        return f"TLS with {host} failed: {what}.", remedy
    if isinstance(error, http.client.BadStatusLine) and not isinstance(
        error, http.client.RemoteDisconnected
    ):
        line = str(error)
        if line.startswith(_TLS_RECORDS):
            return f"{host} speaks TLS, not plain HTTP.", "Give https:// instead of http://."
        said = line.strip()[:_SHOWN]
        return f"{host} does not speak HTTP: it says {said!r}.", "Give the server's own port."
    if isinstance(error, (ConnectionResetError, http.client.RemoteDisconnected)):
        remedy = "Is it an HTTP server? If it speaks TLS, give https:// instead of http://."
        return f"{host} closes the connection without an answer: {what}.", remedy
    return f"{host} can't be reached: {what}.", "Is the server running?"


def no_stream(content_type: str) -> str | None:
    """Why a reply of status 200 is no stream of events; None where it may be one."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml"):
        return "it answers with a web page: is this the API's own address?"
    if kind == "application/json":
        return 'it does not stream: "stream": true is answered by one JSON object'
    return None


def advice(error: str, models: str | None) -> str:
    """What to try where every probe failed in this way; empty where the error says it all."""
    if error.startswith(("HTTP 401", "HTTP 403")):
        return "Give the name of the variable that holds a key: --key-variable NAME."
    if error.startswith(("HTTP 404", "HTTP 400")) and "model" in error.lower():
        return f"It lists {models}: give one with --model." if models else "Give its --model."
    if error.startswith(("HTTP 404", "HTTP 405")):
        return "It has no /v1/chat/completions there: give the URL above its /v1."
    if error.startswith("HTTP 429"):
        return "It turns requests away: try again when it has less to do."
    return ""
