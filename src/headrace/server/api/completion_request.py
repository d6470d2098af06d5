"""A completion request as engine requests: one for each prompt.

Knows OpenAI's fields and which can't be combined; of answers only how they begin.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass, field

from headrace.core.bounds import ECHOED_LOGPROBS
from headrace.core.errors import InvalidRequestError
from headrace.core.request import GenerateRequest, Logprobs, SamplingParams
from headrace.server.observe.record import RequestRecord
from headrace.server.request.call import Call, new_id, take_request_id
from headrace.server.request.generation import new_record
from headrace.server.request.logprobs import CompletionLogprobsWriter, EchoedPrompt
from headrace.server.request.prompts import (
    check_fits,
    encode_bad_words,
    encode_text,
    warn_of_little_room,
)
from headrace.server.request.sampling import (
    asked_tokens,
    cache_salt_of,
    check_most,
    check_stream_options,
    sampling_params,
)
from headrace.server.request.schema import CompletionRequest
from headrace.server.request.service import Service
from headrace.server.request.structured import grammar_of
from headrace.server.request.truncation import truncation_of
from headrace.text import make_request
from headrace.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI's


@dataclass(slots=True, kw_only=True)
class Asked:
    completion_id: str
    requests: list[GenerateRequest]
    records: list[RequestRecord]
    echoes: list[str] | None  # the prompts' texts, if they are echoed
    wants_logprobs: bool
    wants_output: bool  # False if only the prompt's logprobs are asked for
    wants_ids: bool = False
    wants_prompt_logprobs: bool = False  # in vLLM's shape
    created: int = field(default_factory=lambda: int(time.time()))

    _echoed: dict[int, EchoedPrompt] = field(default_factory=dict)  # by the prompt's index

    def take_prompt(
        self, tokenizer: Tokenizer, place: int, found: list[Logprobs | None] | None
    ) -> None:
        """Encodes the echo that all choices of the prompt at index `place` begin with: once for all
        of them, before the first begins. Takes long for a long prompt."""
        if self.echoes is not None and self.wants_logprobs:
            ids, text = self.requests[place].prompt_token_ids, self.echoes[place]
            self._echoed[place] = EchoedPrompt.of(tokenizer, ids, text, found or [None])

    def open_choice(
        self, tokenizer: Tokenizer, place: int
    ) -> tuple[str, CompletionLogprobsWriter | None]:
        """The echo that a choice of the prompt at index `place` begins with."""
        text = self.echoes[place] if self.echoes is not None else ""
        if not self.wants_logprobs:
            return text, None
        if place not in self._echoed:
            self.take_prompt(tokenizer, place, None)  # one token has no score
        return text, CompletionLogprobsWriter(tokenizer, self._echoed.get(place))


async def ask_for(service: Service, call: Call, sent: CompletionRequest) -> Asked:
    check_stream_options(sent)
    _check_fields(sent)
    take_request_id(call, sent.request_id)
    name, asked = asked_tokens(sent, "max_tokens")
    wants_output = not (sent.echo and asked == 0)
    max_tokens = DEFAULT_MAX_TOKENS if asked is None else asked
    prompt_logprobs = sent.prompt_logprobs
    if prompt_logprobs is None and sent.echo:
        prompt_logprobs = sent.logprobs
    params = sampling_params(
        service,
        sent,
        max_tokens=max_tokens if wants_output else 1,  # the engine always samples one
        logprobs=sent.logprobs,
        best_of=sent.best_of,
        prompt_logprobs=prompt_logprobs,
    )
    if sent.stream and params.best_of not in (None, params.n):
        raise InvalidRequestError(
            f"best_of is {params.best_of} with stream; the best are only known at the end.",
            "Leave out one of the two.",
            param="best_of",
        )
    config = service.config
    prompts = _list_prompts(sent.prompt, config.max_prompts)
    # Each takes a place in the queue: more than it has would be refused every time.
    check_most("prompt", len(prompts), config.max_waiting_requests, flag="max-waiting-requests")
    grammar = grammar_of(sent, service.config.max_schema_bytes)
    completion_id = new_id("cmpl")
    truncation = truncation_of(sent, service.context_tokens - (asked or 1))
    tokenizer, requests, echoes = service.model.tokenizer, [], []
    bad_ids = await encode_bad_words(service, params)
    cache_salt = cache_salt_of(sent)
    for place, prompt in enumerate(prompts):
        if place:
            await asyncio.sleep(0)  # a prompt may take a few milliseconds
        if isinstance(prompt, str):
            add_bos = sent.add_special_tokens is not False
            ids = await encode_text(service, prompt, add_bos=add_bos, truncation=truncation)
        else:
            ids = prompt if truncation is None else truncation.cut(prompt)
        check_fits(service, len(ids), max_tokens=asked, max_tokens_name=name)
        request = make_request(
            tokenizer,
            service.model.vocab_size,
            f"{completion_id}-{place}",
            ids,
            params if asked is not None else _fitted(service, call, len(ids), params),
            priority=sent.priority or 0,
            cache_salt=cache_salt,
            timeout_s=service.config.timeout_s if sent.timeout_s is None else sent.timeout_s,
            speculate=sent.speculate,
            grammar=grammar,
            bad_ids=bad_ids,
        )
        requests.append(request)
        _check_echoed(requests, params)
        if sent.echo:
            if isinstance(prompt, str) and truncation is None:
                echoes.append(prompt)
            else:
                echoes.append(tokenizer.decode(ids))
    return Asked(
        completion_id=completion_id,
        requests=requests,
        records=[new_record(call, request) for request in requests],
        echoes=echoes if sent.echo else None,
        wants_logprobs=sent.logprobs is not None,
        wants_output=wants_output,
        wants_ids=bool(sent.return_token_ids),
        wants_prompt_logprobs=sent.prompt_logprobs is not None,
    )


def _check_echoed(requests: list[GenerateRequest], params: SamplingParams) -> None:
    """An answer repeats its prompts' logprobs for every choice."""
    if params.prompt_logprobs is None:
        return
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    entries = tokens * (params.prompt_logprobs + 1) * params.n
    ECHOED_LOGPROBS.check("logprobs" if params.logprobs is not None else "prompt_logprobs", entries)


def _fitted(
    service: Service, call: Call, prompt_tokens: int, params: SamplingParams
) -> SamplingParams:
    """The default max_tokens, limited by the room left in the context."""
    if service.context_tokens - prompt_tokens >= DEFAULT_MAX_TOKENS:
        return params
    warn_of_little_room(service, call, prompt_tokens, DEFAULT_MAX_TOKENS)
    return dataclasses.replace(params, max_tokens=None)


def _check_fields(sent: CompletionRequest) -> None:
    if sent.suffix:
        raise InvalidRequestError(
            "suffix is given; this server can't fill in the middle of a text.",
            "Leave suffix out.",
            param="suffix",
        )


def _list_prompts(sent: str | list[str | int | list[int]], most: int) -> list[str | list[int]]:
    if isinstance(sent, str):
        return [sent]
    if not sent:
        raise InvalidRequestError(
            "prompt is an empty list; expected a text, token ids, or a list of either.",
            "Give at least one prompt.",
            param="prompt",
        )
    if not isinstance(sent[0], int):
        check_most("prompt", len(sent), most, flag="max-prompts")  # before they are processed
    ids = [item for item in sent if isinstance(item, int)]
    if len(ids) == len(sent):
        return [ids]
    if ids:
        raise InvalidRequestError(
            "prompt mixes token ids with texts or lists; expected only one kind.",
            "Put each prompt's token ids into a separate list.",
            param="prompt",
        )
    return [item for item in sent if not isinstance(item, int)]
