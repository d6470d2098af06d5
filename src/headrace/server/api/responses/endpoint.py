"""/v1/responses: a chat in OpenAI's newer shape, which may continue a stored answer.

Knows how an answer is started and ended; schema.py and events.py have the shapes, stored.py the
stored answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.core.request import FinishReason, GenerateRequest, TokenEvent
from headrace.server.api.chat import make_chat_request
from headrace.server.api.responses.events import ResponseBuilder
from headrace.server.api.responses.schema import JsonObject, ResponsesRequest, as_chat
from headrace.server.api.responses.stored import items_before, keep, listed_items
from headrace.server.request.body import read_struct
from headrace.server.request.call import AnyReply, Call, StreamReply, json_reply
from headrace.server.request.ending import check_timeout, with_ending
from headrace.server.request.generation import generate, new_record
from headrace.server.request.logprobs import TokenLogprob, chat_logprobs
from headrace.server.request.service import Service
from headrace.server.request.usage import Usage
from headrace.server.tools.parser import Content, Piece
from headrace.server.tools.plan import ToolUse


async def responses(service: Service, call: Call) -> AnyReply:
    """An answer to a chat in the newer shape, whole or as events; kept, unless `store` is false."""
    sent = await read_struct(call, ResponsesRequest)
    before, before_bytes = items_before(service, call, sent.previous_response_id)
    size_bytes = call.body_bytes + before_bytes
    chat = as_chat(call, sent, before)
    request, use = await make_chat_request(
        service,
        call,
        chat,
        max_tokens_name="max_output_tokens",
        messages_name="input",
        size_bytes=size_bytes,
    )
    params = request.params.chosen
    is_stored = sent.store is not False and service.responses.is_on
    if sent.store and not is_stored:
        call.warn("store is true, but this server stores nothing: --max-stored-responses is 0")
    builder = ResponseBuilder(
        sent,
        service.model.name,
        params.temperature,
        params.top_p,
        is_stored=is_stored,
        tag=service.responses.tag,
    )
    items = before + listed_items(sent.input) if is_stored else None
    answering = _Answering(service, call, request, use, builder, items)
    if sent.stream:
        return StreamReply(chunks=answering.chunks())
    async with aclosing(answering.events()) as events:
        async for _ in events:
            pass
    return json_reply(builder.response)


class _Answering:
    def __init__(
        self,
        service: Service,
        call: Call,
        request: GenerateRequest,
        use: ToolUse,
        builder: ResponseBuilder,
        items: list[JsonObject] | None,
    ) -> None:
        self._service = service
        self._call = call
        self._items = items  # stored with the answer; None: it is not stored
        self._record = new_record(call, request)
        self._found = generate(service, call, request, self._record, use.shown_ids)
        self._parser = use.new_parser()
        self._builder = builder
        self._output_tokens = 0

    def chunks(self) -> AsyncGenerator[bytes]:
        return with_ending(self.events(), self._builder.fail)

    async def events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._found) as found:
            begun = False
            async for step in found:
                # Not before the first token: until then an error can have its own status.
                out = b"" if begun else self._builder.begin()
                begun = True
                out += b"".join(self._event(event) for event in step)
                if out:
                    yield out

    def _event(self, event: TokenEvent) -> bytes:
        self._output_tokens += event.token_id is not None
        check_timeout(event, self._output_tokens)
        out = self._builder.add(self._pieces(event), self._logprobs(event))
        if event.finish_reason is not None:
            usage = Usage.of([self._record], self._output_tokens)
            out += self._builder.end(usage, was_cut=event.finish_reason is not FinishReason.STOP)
            if self._items is not None:
                # Before its last event is sent: after that a client may ask for the response.
                keep(self._service, self._call, self._builder.response, self._items)
        return out

    def _logprobs(self, event: TokenEvent) -> list[TokenLogprob]:
        if event.logprobs is None or event.token_id is None:
            return []
        found = [(event.token_id, event.logprobs)]
        return chat_logprobs(self._service.model.tokenizer, found).content

    def _pieces(self, event: TokenEvent) -> list[Piece]:
        if self._parser is None:
            return [Content(event.text)] if event.text else []
        pieces = self._parser.push(event.text)
        return pieces + self._parser.finish() if event.finish_reason is not None else pieces
