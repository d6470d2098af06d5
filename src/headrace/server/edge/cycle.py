"""One request and its answer on a connection: uvicorn's, fixed for HTTP/1.0 and early answers.

Knows ASGI's messages; not the connection, nor what is asked.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Cycle(RequestResponseCycle):
    _until_close = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self.more_body:
                self.keep_alive = False  # answered before its body arrived, which may be endless
            sized = any(name == b"content-length" for name, _ in message["headers"])
            if self.scope["http_version"] != "1.1" and not sized:
                self._until_close, self.chunked_encoding = True, False  # HTTP/1.0 has no chunks
        elif self._until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
