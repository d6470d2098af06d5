"""Runs one request through the engine: submits it, watches it, turns its tokens into text.

Every endpoint that generates goes through `generate`. Knows requests and events; neither JSON nor
HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial

from headrace.core.errors import HeadraceError
from headrace.core.request import FinishReason, GenerateRequest, TokenEvent
from headrace.server.link.wire import Row
from headrace.server.observe.record import RequestRecord
from headrace.server.request.call import Call
from headrace.server.request.prefill import prefill_of
from headrace.server.request.prompts import off_loop
from headrace.server.request.service import Service
from headrace.text import RequestText


async def generate(
    service: Service,
    call: Call,
    request: GenerateRequest,
    record: RequestRecord | None = None,
    shown_ids: frozenset[int] = frozenset(),
) -> AsyncGenerator[list[TokenEvent]]:
    """The request's events, those of one step together; it runs with its key's cache and share.
    Leaving the loop ends the request; use `contextlib.aclosing` where it may be left early. Pass a
    `record` to learn how many tokens were cached or generated. `shown_ids` as in RequestText."""
    service.check_accepting()
    _sign(service, call, request)
    service.keys.reserve(call, [request])
    ticket = service.queue.enter(request)
    record = record or new_record(call, request)
    if call.reservation is not None:
        record.reserved_tokens = call.reservation.take(request)
    call.records.append(record)
    if service.config.log_content:
        record.prompt = service.model.tokenizer.decode(request.prompt_token_ids)
    for watcher in service.watchers:
        watcher.on_arrival(record)
    text = RequestText(service.model.tokenizer, request, shown_ids)

    def on_start(waited_s: float, cached_tokens: int) -> None:
        ticket.started()
        # Not the present time: the message arrives when the request's first step is over.
        record.started_s = min(time.monotonic(), opened_s + waited_s)
        record.waited_s, record.cached_tokens = waited_s, cached_tokens
        for watcher in service.watchers:
            watcher.on_start(record)

    opened_s = time.monotonic()
    try:
        prefill = prefill_of(service.config, call)
        with ticket, service.supervisor.engine.stream(request, on_start, prefill) as stream:
            while not text.is_complete:
                tokens = await stream.tokens()
                record.right_guesses = stream.right_guesses
                record.wrong_guesses = stream.wrong_guesses
                _watch_tokens(service, record, tokens)
                events: list[TokenEvent] = []
                for token in tokens:
                    index, _, _, reason, extra = token
                    if extra is None or extra.prompt_scores is None:
                        event = text.push(*token)
                    else:  # one text per alternative of each token
                        event = await off_loop(extra.entries, partial(text.push, *token))
                    if event is None:
                        continue
                    if event.finish_reason is not None:
                        record.finish_reason = event.finish_reason.value
                        if event.finish_reason is FinishReason.LENGTH:
                            record.is_cut_by_context |= request.params.max_tokens is None
                        if reason is None:
                            stream.stop(index)  # a stop string, which the engine does not know
                    events.append(event)
                    if service.config.log_content:
                        record.answer += event.text
                if events:
                    yield events
    except HeadraceError as error:
        record.finish_reason, record.error = "error", error.cause
        call.error = error
        raise
    except (asyncio.CancelledError, GeneratorExit):
        record.finish_reason = "abort"
        raise
    finally:
        record.ended_s = time.monotonic()
        for watcher in service.watchers:
            watcher.on_end(record)


def _sign(service: Service, call: Call, request: GenerateRequest) -> None:
    """The request with its key's cache salt and tenant."""
    request.cache_salt = service.keys.cache_salt(call.key_name, request.cache_salt)
    request.tenant = call.key_name or ""
    request.weight = service.keys.weights.get(request.tenant, 1)


def new_record(call: Call, request: GenerateRequest) -> RequestRecord:
    return RequestRecord(
        request_id=call.request_id,
        endpoint=call.path,
        arrived_s=call.arrived_s,
        prompt_tokens=len(request.prompt_token_ids),
        n=request.params.n,
        max_tokens=request.params.max_tokens,
        key_name=call.key_name,
        traceparent=call.headers.get("traceparent"),
    )


def _watch_tokens(service: Service, record: RequestRecord, tokens: list[Row]) -> None:
    count = sum(token_id >= 0 for _, token_id, *_ in tokens)
    if not count:
        return
    now_s = time.monotonic()
    gap_s = None if record.last_token_s is None else now_s - record.last_token_s
    if record.first_token_s is None:
        record.first_token_s = now_s
    record.last_token_s = now_s
    record.output_tokens += count
    if record.n > 1:
        each = record.continuation_tokens
        for index, token_id, *_ in tokens:
            if token_id >= 0:
                each[index] = each.get(index, 0) + 1
    for watcher in service.watchers:
        watcher.on_tokens(record, count, gap_s)
