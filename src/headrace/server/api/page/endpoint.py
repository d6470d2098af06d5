"""/: the server's own page. It holds no data: its script asks the API with the key it is given.

Style and script are put into the document once, and the Content-Security-Policy allows exactly
those two by their hashes: nothing else can run, and nothing can be loaded from or sent to
anywhere but this server. Works without a network.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from headrace.server.request.call import AnyReply, Call, Reply
from headrace.server.request.service import Service

SCRIPTS = (
    "ask.js",
    "charts.js",
    "live.js",
    "markdown.js",
    "chat.js",
    "fit.js",
    "panels.js",
    "main.js",
)
_HEADERS = {
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


async def page(service: Service, call: Call) -> AnyReply:
    """A page to watch and try this server in a browser."""
    document, policy = made()
    headers = {**_HEADERS, "content-security-policy": policy}
    return Reply(body=document, content_type="text/html; charset=utf-8", headers=headers)


@cache
def made() -> tuple[bytes, str]:
    """The document and its Content-Security-Policy."""
    here = resources.files(__package__)
    style = here.joinpath("page.css").read_text("utf-8")
    parts = [here.joinpath(name).read_text("utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"
    document = here.joinpath("page.html").read_text("utf-8")
    document = document.replace("/* style */", style).replace("/* script */", script)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return document.encode("utf-8"), policy


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"
