"""One entry of routes.py: the endpoint at a path, and the types of its request and answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.server.request.call import OPENAI_ERRORS, Endpoint, ErrorShape

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The OpenAPI description is made from this and the endpoint's docstring."""

    # One part may be open: /v1/models/{model} matches the rest of the path, slashes included.
    path: str
    endpoint: Endpoint
    methods: tuple[str, ...] = ("GET",)
    is_open: bool = False  # needs no key
    is_operators: bool = False  # about everybody's requests: see server/access/operators.py
    tells_operators_more: bool = False  # the answer has more for operators
    request: type[msgspec.Struct] | None = None  # the body
    response: Any = None  # the type of a 200's body; None: some JSON object
    content_type: str = JSON  # of a 200
    streams: bool = False  # answers with events where `stream` is true
    statuses: tuple[int, ...] = ()  # additional ones, besides those of its kind
    query: type[msgspec.Struct] | None = None  # what may follow the path's "?"
    error_shape: ErrorShape = OPENAI_ERRORS

    def matches(self, path: str) -> bool:
        start, brace, rest = self.path.partition("{")
        if not brace:
            return path == self.path
        end = rest.partition("}")[2]
        return path.startswith(start) and path.endswith(end) and len(path) > len(start) + len(end)
