"""One request's way through the engine: submitted, watched, turned into text, ended.

Every endpoint that generates goes through `generate`. Knows requests and events; neither JSON nor
HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace.core.request import GenerateRequest, TokenEvent
from headrace.server.service import Service
from headrace.text import RequestText


async def generate(service: Service, request: GenerateRequest) -> AsyncIterator[list[TokenEvent]]:
    """The request's events, those of one step together. Leaving the loop ends the request."""
    text = RequestText(service.model.tokenizer, request)
    with service.supervisor.engine.stream(request) as stream:
        while not text.is_complete:
            events: list[TokenEvent] = []
            for token in await stream.tokens():
                event = text.push(token)
                if event is None:
                    continue
                if event.finish_reason is not None and token.finish_reason is None:
                    stream.stop(token.index)  # at a stop string, which the engine does not know
                events.append(event)
            if events:
                yield events
