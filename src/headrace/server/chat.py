"""/v1/chat/completions: messages in, an answer out. Streams are chat_stream.py's.

Knows OpenAI's shapes. How a prompt becomes tokens is prompts.py's affair, how tokens come is
generation.py's.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Literal

import msgspec

from headrace.core.errors import InvalidRequestError
from headrace.core.request import CompletionOutput, FinishReason, GenerateRequest
from headrace.server.body import read_struct
from headrace.server.call import AnyReply, Call, StreamReply, json_reply, new_id
from headrace.server.chat_stream import ChatStream
from headrace.server.ending import check_timeout, ending
from headrace.server.functions import refuse_functions
from headrace.server.generation import generate, new_record
from headrace.server.logprobs import ChatLogprobs, chat_logprobs
from headrace.server.prompts import encode_chat
from headrace.server.sampling import check_stream_options, sampling_params
from headrace.server.schema import ChatRequest
from headrace.server.service import Service
from headrace.server.structured import grammar_of
from headrace.server.tool_deltas import ToolCall, whole_call
from headrace.server.tool_parser import parse_answer
from headrace.server.tools import ToolUse, plan_tools
from headrace.server.usage import Usage
from headrace.text import OutputBuilder, make_request
from headrace.tokenizer.tokenizer import Tokenizer


class Message(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct):
    index: int
    message: Message
    finish_reason: str | None
    logprobs: ChatLogprobs | None
    stop_reason: str | None = None  # not OpenAI's: "timeout" where that cut the answer


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


async def chat_completions(service: Service, call: Call) -> AnyReply:
    """An answer to a chat, whole or as events."""
    sent = read_struct(call, ChatRequest)
    request, use = await make_chat_request(service, call, sent)
    if sent.stream:
        return StreamReply(chunks=ChatStream(service, call, sent, request, use).chunks())
    return json_reply(await _complete(service, call, request, use))


async def make_chat_request(
    service: Service, call: Call, sent: ChatRequest, *, size_bytes: int | None = None
) -> tuple[GenerateRequest, ToolUse]:
    """What the engine is asked, and how to read its answer; every field checked. `size_bytes` is
    about how long the messages are, where they are not all of the body."""
    check_stream_options(sent)
    refuse_functions(sent)
    if sent.top_logprobs is not None and not sent.logprobs:
        raise InvalidRequestError(
            "top_logprobs is given without logprobs.", "Set logprobs to true.", param="top_logprobs"
        )
    params = sampling_params(
        service,
        sent,
        max_tokens=_max_tokens(sent),
        logprobs=(sent.top_logprobs or 0) if sent.logprobs else None,
        logprobs_param="top_logprobs",
    )
    tokenizer, max_bytes = service.model.tokenizer, service.config.max_schema_bytes
    use = plan_tools(
        tokenizer,
        sent.messages,
        tools=sent.tools,
        tool_choice=sent.tool_choice,
        parallel=sent.parallel_tool_calls,
        answer=grammar_of(sent, max_bytes),
        max_bytes=max_bytes,
    )
    request = make_request(
        tokenizer,
        service.model.vocab_size,
        new_id("chatcmpl"),
        await encode_chat(
            service, use.messages, use.template_tools, sent, size_bytes or len(call.body)
        ),
        params,
        priority=sent.priority or 0,
        cache_salt=sent.cache_salt or "",
        timeout_s=service.config.timeout_s if sent.timeout_s is None else sent.timeout_s,
        grammar=use.grammar,
    )
    return request, use


def _max_tokens(sent: ChatRequest) -> int | None:
    newer, older = sent.max_completion_tokens, sent.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequestError(
            f"max_completion_tokens is {newer} and max_tokens is {older}; expected one number.",
            "Send max_completion_tokens alone: max_tokens is its old name.",
            param="max_completion_tokens",
        )
    if newer is not None and newer < 1:
        raise InvalidRequestError(
            f"max_completion_tokens is {newer}; expected an integer of at least 1.",
            "Leave it out for an answer of any length.",
            param="max_completion_tokens",
        )
    return older if newer is None else newer


async def _complete(
    service: Service, call: Call, request: GenerateRequest, use: ToolUse
) -> ChatCompletion:
    record = new_record(call, request)
    answer = OutputBuilder(request, None)
    output_tokens = 0
    async with aclosing(generate(service, call, request, record, use.shown_ids)) as found:
        async for events in found:
            for event in events:
                output_tokens += event.token_id is not None
                check_timeout(event, output_tokens)
                answer.add(event)
    return ChatCompletion(
        id=request.request_id,
        created=int(time.time()),
        model=service.model.name,
        system_fingerprint=service.fingerprint or None,
        choices=[_choice(service.model.tokenizer, each, use) for each in answer.build().outputs],
        usage=Usage.of([record], output_tokens),
    )


def _choice(tokenizer: Tokenizer, output: CompletionOutput, use: ToolUse) -> Choice:
    assert output.finish_reason is not None
    reason, stop_reason = ending(FinishReason(output.finish_reason))
    logprobs = None
    if output.logprobs is not None:
        found = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = chat_logprobs(tokenizer, found)
    message = Message(output.text)
    if use.tool_format is not None:
        parsed = parse_answer(use.tool_format, output.text)
        message.content = parsed.content or None
        if parsed.whole_calls:
            message.tool_calls = [whole_call(found) for found in parsed.whole_calls]
            reason = "tool_calls" if reason == "stop" else reason
    return Choice(output.index, message, reason, logprobs, stop_reason)
