"""One entry of routes.py: who answers at a path, and what is asked and answered there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.server.request.call import OPENAI_ERRORS, Endpoint, ErrorShape

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The OpenAPI description is made of this and of the endpoint's docstring."""

    # One part may be open: /v1/models/{model} takes whatever follows, slashes too.
    path: str
    endpoint: Endpoint
    methods: tuple[str, ...] = ("GET",)
    is_open: bool = False  # answers without a key
    is_operators: bool = (
        False  # tells of everybody's requests: server/access/operators.py says who may
    )
    tells_operators_more: bool = False  # and others little
    request: type[msgspec.Struct] | None = None  # the body
    response: Any = None  # the type of a 200's body; None: some JSON object
    content_type: str = JSON  # of a 200
    streams: bool = False  # answers with events where `stream` is true
    statuses: tuple[int, ...] = ()  # that it can answer beside those of its kind
    query: type[msgspec.Struct] | None = None  # what may follow the path's "?"
    error_shape: ErrorShape = OPENAI_ERRORS

    def matches(self, path: str) -> bool:
        start, brace, rest = self.path.partition("{")
        if not brace:
            return path == self.path
        end = rest.partition("}")[2]
        return path.startswith(start) and path.endswith(end) and len(path) > len(start) + len(end)
