"""/v1/chat/completions: messages in, an answer out. chat_stream.py has the streams.

Knows OpenAI's shapes. server/request/prompts.py tokenizes prompts, server/request/generation.py
runs the engine request.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Literal

import msgspec

from headrace.core.bounds import ECHOED_LOGPROBS
from headrace.core.errors import InvalidRequestError
from headrace.core.request import CompletionOutput, GenerateRequest
from headrace.server.api.chat_stream import ChatStream
from headrace.server.api.functions import refuse_functions
from headrace.server.request.body import read_struct
from headrace.server.request.call import (
    AnyReply,
    Call,
    StreamReply,
    json_reply,
    new_id,
    take_request_id,
)
from headrace.server.request.ending import check_timeout, ending
from headrace.server.request.generation import generate, new_record
from headrace.server.request.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    answer_entries,
    chat_logprobs,
    encoded,
    prompt_logprobs,
)
from headrace.server.request.prompts import (
    LITTLE_ROOM_TOKENS,
    check_fits,
    check_messages,
    encode_bad_words,
    encode_chat,
    off_loop,
    warn_of_little_room,
)
from headrace.server.request.sampling import (
    asked_tokens,
    cache_salt_of,
    check_stream_options,
    sampling_params,
)
from headrace.server.request.schema import ChatRequest
from headrace.server.request.service import Service
from headrace.server.request.structured import grammar_of
from headrace.server.request.truncation import truncation_of
from headrace.server.request.usage import Usage
from headrace.server.tools.deltas import ToolCall, whole_call
from headrace.server.tools.kinds import callable_tools
from headrace.server.tools.parser import parse_answer
from headrace.server.tools.plan import ToolUse, plan_tools
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
    stop_reason: str | None = None  # not OpenAI's: "timeout" if that cut the answer
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # vLLM's, where asked for


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    # vLLM's, where asked for.
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


async def chat_completions(service: Service, call: Call) -> AnyReply:
    """An answer to a chat, whole or as events."""
    sent = await read_struct(call, ChatRequest)
    request, use = await make_chat_request(service, call, sent)
    if sent.stream:
        return StreamReply(chunks=ChatStream(service, call, sent, request, use).chunks())
    return await _complete(service, call, sent, request, use)


async def make_chat_request(
    service: Service,
    call: Call,
    sent: ChatRequest,
    *,
    max_tokens_name: str | None = None,
    messages_name: str = "messages",
    size_bytes: int | None = None,
) -> tuple[GenerateRequest, ToolUse]:
    """The engine request, and how to parse its answer; every field is checked. Endpoints whose
    fields for max_tokens and messages have other names pass these; `size_bytes` is the rough size
    of the messages, where they are not all of the body."""
    check_stream_options(sent)
    refuse_functions(sent)
    take_request_id(call, sent.request_id)
    if sent.top_logprobs is not None and not sent.logprobs:
        raise InvalidRequestError(
            "top_logprobs is given without logprobs.", "Set logprobs to true.", param="top_logprobs"
        )
    found_name, max_tokens = asked_tokens(sent, "max_completion_tokens", "max_tokens")
    params = sampling_params(
        service,
        sent,
        max_tokens=max_tokens,
        logprobs=(sent.top_logprobs or 0) if sent.logprobs else None,
        logprobs_param="top_logprobs",
        prompt_logprobs=sent.prompt_logprobs,
    )
    tokenizer, max_bytes = service.model.tokenizer, service.config.max_schema_bytes
    check_messages(sent.messages, messages_name)
    use = plan_tools(
        tokenizer,
        sent.messages,
        tools=callable_tools(call, sent.tools),
        tool_choice=sent.tool_choice,
        parallel=sent.parallel_tool_calls,
        answer=grammar_of(sent, max_bytes),
        max_bytes=max_bytes,
    )
    truncation = truncation_of(sent, service.context_tokens - (max_tokens or 1))
    size_bytes = size_bytes or call.body_bytes
    ids = await encode_chat(service, use.messages, use.template_tools, sent, size_bytes, truncation)
    check_fits(
        service,
        len(ids),
        max_tokens=max_tokens,
        max_tokens_name=max_tokens_name or found_name,
        where="messages",
    )
    if max_tokens is None:
        warn_of_little_room(service, call, len(ids), LITTLE_ROOM_TOKENS)
    request = make_request(
        tokenizer,
        service.model.vocab_size,
        new_id("chatcmpl"),
        ids,
        params,
        priority=sent.priority or 0,
        cache_salt=cache_salt_of(sent),
        timeout_s=service.config.timeout_s if sent.timeout_s is None else sent.timeout_s,
        speculate=sent.speculate,
        grammar=use.grammar,
        bad_ids=await encode_bad_words(service, params),
    )
    if params.prompt_logprobs is not None:
        entries = len(ids) * (params.prompt_logprobs + 1)  # once, for any n
        ECHOED_LOGPROBS.check("prompt_logprobs", entries)
    return request, use


async def _complete(
    service: Service, call: Call, sent: ChatRequest, request: GenerateRequest, use: ToolUse
) -> AnyReply:
    record = new_record(call, request)
    answer = OutputBuilder(request, None)
    output_tokens = 0
    async with aclosing(generate(service, call, request, record, use.shown_ids)) as found:
        async for events in found:
            for event in events:
                output_tokens += event.token_id is not None
                check_timeout(event, output_tokens)
                answer.add(event)
    output, usage = answer.build(), Usage.of([record], output_tokens)

    def write() -> AnyReply:
        completion = ChatCompletion(
            id=request.request_id,
            created=int(time.time()),
            model=service.model.name,
            system_fingerprint=service.fingerprint or None,
            choices=[_choice(service.model.tokenizer, each, use) for each in output.outputs],
            usage=usage,
        )
        if sent.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if sent.return_token_ids:
            completion.prompt_token_ids = output.prompt_token_ids
            for choice, each in zip(completion.choices, output.outputs, strict=True):
                choice.token_ids = each.token_ids
        return json_reply(completion)

    return await off_loop(answer_entries(output), write)


def _choice(tokenizer: Tokenizer, output: CompletionOutput, use: ToolUse) -> Choice:
    assert output.finish_reason is not None
    reason, stop_reason = ending(output.finish_reason)
    logprobs = None
    if output.logprobs is not None:
        found = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = encoded(chat_logprobs(tokenizer, found))
    message = Message(output.text)
    if use.tool_format is not None:
        parsed = parse_answer(use.tool_format, output.text)
        message.content = parsed.content or None
        if parsed.whole_calls:
            message.tool_calls = [whole_call(found) for found in parsed.whole_calls]
            reason = use.called_reason(reason)
    return Choice(output.index, message, reason, logprobs, stop_reason)
