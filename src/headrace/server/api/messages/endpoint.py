"""/v1/messages and /v1/messages/count_tokens: a chat in Anthropic's shape.

Knows how an answer is started and ended; the files beside it have the shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from headrace.core.errors import ContextLengthError
from headrace.core.request import FinishReason, GenerateRequest, TokenEvent
from headrace.server.api.chat import make_chat_request
from headrace.server.api.messages.errors import messages_error_event
from headrace.server.api.messages.events import MessageBuilder, MessageUsage
from headrace.server.api.messages.schema import CountTokensRequest, MessagesRequest, as_chat
from headrace.server.request.body import read_struct
from headrace.server.request.call import AnyReply, Call, StreamReply, json_reply
from headrace.server.request.ending import check_timeout, with_ending
from headrace.server.request.generation import generate, new_record
from headrace.server.request.prompts import encode_chat
from headrace.server.request.sampling import check_model
from headrace.server.request.service import Service
from headrace.server.request.usage import Usage
from headrace.server.tools.parser import Content, Piece
from headrace.server.tools.plan import ToolUse, plan_tools


class TokenCount(msgspec.Struct):
    input_tokens: int


async def messages(service: Service, call: Call) -> AnyReply:
    """An answer to a chat in Anthropic's shape, whole or as events."""
    sent = await read_struct(call, MessagesRequest)
    request, use = await make_chat_request(service, call, as_chat(call, sent))
    room = _room(service, len(request.prompt_token_ids))
    # Clients ask for the maximum of their own models; running into the end of the context is a
    # stop_reason, not an error.
    max_tokens = min(sent.max_tokens, room)
    request.params = dataclasses.replace(request.params, max_tokens=max_tokens)
    was_cut = "max_tokens" if sent.max_tokens <= room else "model_context_window_exceeded"
    answering = _Answering(service, call, request, use, was_cut)
    if sent.stream:
        return StreamReply(chunks=answering.chunks())
    async with aclosing(answering.events()) as events:
        async for _ in events:
            pass
    return json_reply(answering.builder.message)


async def count_tokens(service: Service, call: Call) -> AnyReply:
    """How many tokens a request's prompt has."""
    chat = as_chat(call, await read_struct(call, CountTokensRequest))
    check_model(service, chat.model)
    use = plan_tools(
        service.model.tokenizer,
        chat.messages,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        max_bytes=service.config.max_schema_bytes,
    )
    ids = await encode_chat(service, use.messages, use.template_tools, chat, call.body_bytes)
    return json_reply(TokenCount(len(ids)))


def _room(service: Service, prompt_tokens: int) -> int:
    """For an answer."""
    context = service.context_tokens
    if prompt_tokens >= context:
        raise ContextLengthError(
            f"The prompt has {prompt_tokens} tokens; the context holds {context}.",
            "Shorten the prompt.",
            param="messages",
            prompt_tokens=prompt_tokens,
            most_tokens=context - 1,
        )
    return context - prompt_tokens


class _Answering:
    def __init__(
        self, service: Service, call: Call, request: GenerateRequest, use: ToolUse, was_cut: str
    ) -> None:
        self.builder = MessageBuilder(service.model.name)
        self._call = call
        self._record = new_record(call, request)
        self._found = generate(service, call, request, self._record, use.shown_ids)
        self._parser = use.new_parser()
        self._was_cut = was_cut  # the stop_reason if the length limit ends it
        self._output_tokens = 0

    def chunks(self) -> AsyncGenerator[bytes]:
        return with_ending(
            self.events(), lambda error: messages_error_event(error, self._call.request_id)
        )

    async def events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._found) as found:
            begun = False
            async for step in found:
                # Not before the first token: until then an error can have its own status.
                out = b"" if begun else self.builder.begin(self._usage())
                begun = True
                out += b"".join(self._event(event) for event in step)
                if out:
                    yield out

    def _event(self, event: TokenEvent) -> bytes:
        self._output_tokens += event.token_id is not None
        check_timeout(event, self._output_tokens)
        out = self.builder.add(self._pieces(event))
        if event.finish_reason is not None:
            out += self.builder.end(self._usage(), *self._ending(event))
        return out

    def _pieces(self, event: TokenEvent) -> list[Piece]:
        if self._parser is None:
            return [Content(event.text)] if event.text else []
        pieces = self._parser.push(event.text)
        return pieces + self._parser.finish() if event.finish_reason is not None else pieces

    def _ending(self, event: TokenEvent) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        if event.finish_reason is not FinishReason.STOP:
            return self._was_cut, None
        if self.builder.whole_calls:
            return "tool_use", None
        if event.stop_string is not None:
            return "stop_sequence", event.stop_string
        return "end_turn", None

    def _usage(self) -> MessageUsage:
        return MessageUsage.of(Usage.of([self._record], self._output_tokens))
