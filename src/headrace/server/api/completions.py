"""/v1/completions: continues plain prompts, OpenAI's older API. completions_stream.py has the
streams.

Each prompt is one engine request; choices are numbered prompt by prompt. Knows OpenAI's shapes;
server/request/generation.py runs the engine requests.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Literal, cast

import msgspec
from msgspec import UNSET, Raw

from headrace.core.request import GenerateRequest, RequestOutput
from headrace.server.api.completion_request import Asked, ask_for
from headrace.server.api.completions_stream import CompletionStream
from headrace.server.observe.record import RequestRecord
from headrace.server.request.body import read_struct
from headrace.server.request.call import AnyReply, Call, StreamReply, json_reply
from headrace.server.request.ending import check_timeout, ending
from headrace.server.request.generation import generate
from headrace.server.request.interleave import gather_all
from headrace.server.request.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    answer_entries,
    prompt_logprobs,
)
from headrace.server.request.prompts import off_loop
from headrace.server.request.schema import CompletionRequest
from headrace.server.request.service import Service
from headrace.server.request.usage import Usage
from headrace.text import OutputBuilder
from headrace.tokenizer.tokenizer import Tokenizer


class CompletionChoice(msgspec.Struct):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | None = None  # not OpenAI's: "timeout" if that cut the text
    # vLLM's, where asked for.
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"


async def completions(service: Service, call: Call) -> AnyReply:
    """Prompts continued, whole or as events."""
    sent = await read_struct(call, CompletionRequest)
    asked = await ask_for(service, call, sent)
    service.keys.reserve(call, asked.requests)
    if sent.stream:
        return StreamReply(chunks=CompletionStream(service, call, sent, asked).chunks())
    return await _complete(service, call, asked)


async def _complete(service: Service, call: Call, asked: Asked) -> AnyReply:
    work = [_run(service, call, *pair) for pair in zip(asked.requests, asked.records, strict=True)]
    found = [await work[0]] if len(work) == 1 else await gather_all(work)
    output_tokens = sum(count for _, count in found) if asked.wants_output else 0
    whole = Completion(
        id=asked.completion_id,
        created=asked.created,
        model=service.model.name,
        system_fingerprint=service.fingerprint or None,
        choices=[],
        usage=Usage.of(asked.records, output_tokens),
    )

    def write() -> AnyReply:
        whole.choices = [
            choice
            for place, (output, _) in enumerate(found)
            for choice in _choices(service.model.tokenizer, asked, place, output)
        ]
        return json_reply(whole)

    return await off_loop(sum(answer_entries(output) for output, _ in found), write)


async def _run(
    service: Service, call: Call, request: GenerateRequest, record: RequestRecord
) -> tuple[RequestOutput, int]:
    """A prompt's continuations, and the number of tokens generated, including those that best_of
    dropped."""
    answer = OutputBuilder(request, None)
    output_tokens = 0
    async with aclosing(generate(service, call, request, record)) as found:
        async for events in found:
            for event in events:
                output_tokens += event.token_id is not None
                check_timeout(event, output_tokens)
                answer.add(event)
    return answer.build(), output_tokens


def _choices(
    tokenizer: Tokenizer, asked: Asked, place: int, output: RequestOutput
) -> list[CompletionChoice]:
    choices = []
    asked.take_prompt(tokenizer, place, output.prompt_logprobs)
    prompt = prompt_logprobs(output.prompt_logprobs) if asked.wants_prompt_logprobs else UNSET
    for each in output.outputs:
        text, writer = asked.open_choice(tokenizer, place)
        if asked.wants_output:
            text += each.text
            if writer is not None:
                for token_id, here in zip(each.token_ids, each.logprobs or [], strict=True):
                    writer.add(token_id, here)
        # Encoded already: the prompt's part was encoded once for all choices.
        logprobs = None if writer is None else cast("CompletionLogprobs", Raw(writer.take()))
        assert each.finish_reason is not None
        reason, stop_reason = ending(each.finish_reason)
        choice = CompletionChoice(
            text=text,
            index=place * len(output.outputs) + each.index,
            logprobs=logprobs,
            finish_reason=reason if asked.wants_output else "length",
            stop_reason=stop_reason,
            prompt_logprobs=prompt,
        )
        if asked.wants_ids:
            choice.prompt_token_ids = output.prompt_token_ids
            choice.token_ids = each.token_ids if asked.wants_output else []
        choices.append(choice)
    return choices
