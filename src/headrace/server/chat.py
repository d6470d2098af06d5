"""/v1/chat/completions: messages in, an answer out, whole or streamed.

Knows OpenAI's shapes. How a prompt becomes tokens is the template's affair, how tokens come is
generation.py's.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import GenerateRequest, Logprobs, TokenEvent
from headrace.server.body import read_struct
from headrace.server.call import (
    AnyReply,
    Call,
    StreamReply,
    encode_json,
    error_event,
    json_reply,
    new_id,
)
from headrace.server.generation import generate
from headrace.server.sampling import sampling_params
from headrace.server.schema import ChatRequest
from headrace.server.service import Service
from headrace.server.usage import Usage
from headrace.text import make_request


class Message(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None


class Choice(msgspec.Struct):
    index: int
    message: Message
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None


async def chat_completions(service: Service, call: Call) -> AnyReply:
    sent = read_struct(call, ChatRequest)
    request = await _make_request(service, sent)
    if sent.stream:
        return StreamReply(chunks=_stream(service, call, sent, request))
    return json_reply(await _complete(service, call, request))


async def _make_request(service: Service, sent: ChatRequest) -> GenerateRequest:
    logprobs = (sent.top_logprobs or 0) if sent.logprobs else None
    if sent.top_logprobs is not None and not sent.logprobs:
        raise InvalidRequestError(
            "top_logprobs is given without logprobs.", "Set logprobs to true.", param="top_logprobs"
        )
    params = sampling_params(
        service,
        sent,
        max_tokens=sent.max_completion_tokens or sent.max_tokens,
        logprobs=logprobs,
    )
    extra = sent.chat_template_kwargs or {}
    token_ids = service.model.chat_template.encode(sent.messages, tools=sent.tools, **extra)
    return make_request(
        service.model.tokenizer,
        service.model.vocab_size,
        new_id("chatcmpl"),
        token_ids,
        params,
        priority=sent.priority or 0,
        cache_salt=sent.cache_salt or "",
        timeout_s=sent.timeout_s or service.config.timeout_s,
    )


async def _complete(service: Service, call: Call, request: GenerateRequest) -> ChatCompletion:
    choices = [
        Choice(index=i, message=Message(role="assistant", content=""), finish_reason=None)
        for i in range(request.params.n)
    ]
    usage = Usage(prompt_tokens=len(request.prompt_token_ids))
    async for events in generate(service, call, request):
        for event in events:
            usage.count(event.token_id is not None)
            choice = choices[event.index]
            choice.message.content = (choice.message.content or "") + event.text
            if event.logprobs is not None:
                choice.logprobs = choice.logprobs or {"content": []}
                choice.logprobs["content"].append(_logprob(event, event.logprobs))
            if event.finish_reason is not None:
                choice.finish_reason = event.finish_reason.value
    return ChatCompletion(
        id=request.request_id,
        created=int(time.time()),
        model=service.model.name,
        choices=choices,
        usage=usage,
    )


async def _stream(
    service: Service, call: Call, sent: ChatRequest, request: GenerateRequest
) -> AsyncIterator[bytes]:
    options = sent.stream_options
    wants_usage = options is not None and bool(options.include_usage)
    usage = Usage(prompt_tokens=len(request.prompt_token_ids))
    created, model = int(time.time()), service.model.name

    def data(choices: list[ChunkChoice], total: Usage | None = None) -> bytes:
        chunk = Chunk(
            id=request.request_id, created=created, model=model, choices=choices, usage=total
        )
        return b"data: " + encode_json(chunk) + b"\n\n"

    opened = False
    try:
        async for events in generate(service, call, request):
            out = b""
            if not opened:
                opened = True
                for i in range(request.params.n):
                    out += data([ChunkChoice(index=i, delta=Delta(role="assistant", content=""))])
            for event in events:
                usage.count(event.token_id is not None)
                if not event.text and event.finish_reason is None and event.logprobs is None:
                    continue
                logprobs = None
                if event.logprobs is not None:
                    logprobs = {"content": [_logprob(event, event.logprobs)]}
                out += data(
                    [
                        ChunkChoice(
                            index=event.index,
                            delta=Delta(content=event.text) if event.text else Delta(),
                            finish_reason=event.finish_reason and event.finish_reason.value,
                            logprobs=logprobs,
                        )
                    ]
                )
            if out:
                yield out
        yield (data([], usage) if wants_usage else b"") + b"data: [DONE]\n\n"
    except HeadraceError as error:
        if not opened:
            raise
        yield error_event(error)


def _logprob(event: TokenEvent, found: Logprobs) -> dict[str, Any]:
    assert event.token_id is not None
    own = found[event.token_id]
    listed = sorted((p for p in found.values() if p.rank is not None), key=lambda p: p.rank or 0)
    return {
        **_shown(own.decoded_token, own.logprob),
        "top_logprobs": [_shown(p.decoded_token, p.logprob) for p in listed],
    }


def _shown(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
