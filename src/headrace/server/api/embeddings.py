"""/v1/embeddings: texts as vectors of the served model.

A vector is the mean over the text's tokens of the model's last hidden states, after its final norm,
scaled to length 1. Generative models are not trained for this: similar texts get similar vectors,
but models made for embeddings do it better. Knows OpenAI's shapes; each input is one engine
request, a bounded number of them at a time.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import aclosing
from typing import Literal

import msgspec

from headrace.core.bounds import INPUT_TOKENS, INPUTS
from headrace.core.context import longest
from headrace.core.errors import ContextLengthError, HeadraceError, InvalidRequestError
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.server.request.body import read_struct
from headrace.server.request.call import (
    AnyReply,
    Call,
    encode_json,
    json_reply,
    new_id,
    take_request_id,
)
from headrace.server.request.ending import check_time_left, check_timeout
from headrace.server.request.generation import generate
from headrace.server.request.interleave import gather_all
from headrace.server.request.prompts import encode_text
from headrace.server.request.sampling import check_model
from headrace.server.request.schema import EmbeddingRequest
from headrace.server.request.service import Service
from headrace.server.request.truncation import truncation_of
from headrace.text import make_request

AT_A_TIME = 32  # engine requests of one call, or as many as its key may have


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str  # numbers, or base64 of little-endian float32
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[
        msgspec.Raw
    ]  # of Embedding, encoded as they arrive: thousands at once would delay others
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


async def embeddings(service: Service, call: Call) -> AnyReply:
    """Texts as vectors: the mean of the model's last hidden states, of length 1."""
    sent = await read_struct(call, EmbeddingRequest)
    take_request_id(call, sent.request_id)
    _check_fields(service, sent)
    timeout_s = service.config.timeout_s if sent.timeout_s is None else sent.timeout_s
    requests = await _make_requests(service, sent, timeout_s)
    found: list[msgspec.Raw] = [msgspec.Raw(b"")] * len(requests)
    left = iter(enumerate(requests))
    at_a_time = service.keys.reserve(call, requests, AT_A_TIME)
    as_base64 = sent.encoding_format == "base64"

    async def work(left: Iterator[tuple[int, GenerateRequest]]) -> None:
        for index, request in left:
            if timeout_s is not None:  # what is left of it: the timeout is for the whole call
                left_s = call.arrived_s + timeout_s - time.monotonic()
                check_time_left(left_s)
                request.timeout_s = left_s
            vector = _unit(await _embed(service, call, request))
            shown = _base64(vector) if as_base64 else vector
            found[index] = msgspec.Raw(encode_json(Embedding(index, shown)))

    await gather_all([work(left) for _ in range(at_a_time)])
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    return json_reply(EmbeddingList(found, service.model.name, EmbeddingUsage(tokens, tokens)))


def _check_fields(service: Service, sent: EmbeddingRequest) -> None:
    check_model(service, sent.model)
    size = service.model.hidden_size
    if sent.dimensions is not None and sent.dimensions != size:
        raise InvalidRequestError(
            f"dimensions is {sent.dimensions}; this model's vectors have {size}.",
            "Leave dimensions out.",
            param="dimensions",
        )


async def _make_requests(
    service: Service, sent: EmbeddingRequest, timeout_s: float | None
) -> list[GenerateRequest]:
    context, size, call_id = service.context_tokens, service.model.vocab_size, new_id("embd")
    truncation, add_bos = truncation_of(sent, context), sent.add_special_tokens is not False
    requests: list[GenerateRequest] = []
    inputs, tokens = _list_inputs(sent.input), 0
    if truncation is None:
        _check_tokens(service, _least_tokens(service, inputs))  # before any is tokenized
    for place, given in enumerate(inputs):
        if place:
            await asyncio.sleep(0)  # each may take a few milliseconds
        where = "input" if isinstance(sent.input, str) else f"input[{place}]"
        if isinstance(given, str):
            ids = await encode_text(service, given, add_bos=add_bos, truncation=truncation)
        else:
            ids = given if truncation is None else truncation.cut(given)
        if not ids:
            raise InvalidRequestError(
                f"{where} is empty; expected at least one token.", "Leave it out.", param="input"
            )
        if len(ids) > context:
            raise ContextLengthError(
                f"{longest(context)} However, {where} has {len(ids)} tokens.",
                "Cut it into shorter texts, or send truncate_prompt_tokens: -1 to have its end "
                "alone.",
                param="input",
            )
        if not isinstance(given, str) and not (min(ids) >= 0 and max(ids) < size):
            raise InvalidRequestError(
                f"{where} has a token id outside 0 to {size - 1}.",
                "Encode the text with this model's tokenizer: POST /tokenize.",
                param="input",
            )
        tokens += len(ids)
        _check_tokens(service, tokens)
        request = make_request(
            service.model.tokenizer,
            size,
            f"{call_id}-{place}",
            ids,
            SamplingParams(max_tokens=1),
            priority=sent.priority or 0,
            cache_salt=sent.cache_salt or "",
            timeout_s=timeout_s,
            embed=True,
        )
        requests.append(request)
    return requests


def _least_tokens(service: Service, inputs: list[str | list[int]]) -> int:
    """A lower bound for the tokens of all inputs together."""
    longest_token = service.model.tokenizer.longest_token_characters
    return sum(
        len(given) // longest_token if isinstance(given, str) else len(given) for given in inputs
    )


def _check_tokens(service: Service, tokens: int) -> None:
    remedy = f"{INPUT_TOKENS.remedy} Or start the server with --max-embedding-tokens."
    most = service.config.max_embedding_tokens
    INPUT_TOKENS.check("input", tokens, most=most, remedy=remedy)


def _list_inputs(sent: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(sent, str):
        return [sent]
    if sent and not isinstance(sent[0], int):
        INPUTS.check("input", len(sent))  # before they are looked at
    ids = [item for item in sent if isinstance(item, int)]
    if ids and len(ids) == len(sent):
        return [ids]
    if not sent or ids:
        raise InvalidRequestError(
            f"input is {'mixed' if ids else 'an empty list'}; expected a text, token ids, or a "
            "list of either.",
            "Send texts and token ids in separate requests.",
            param="input",
        )
    return [item for item in sent if not isinstance(item, int)]


async def _embed(service: Service, call: Call, request: GenerateRequest) -> list[float]:
    vector = None
    async with aclosing(generate(service, call, request)) as found:
        async for events in found:
            for event in events:
                check_timeout(event, 0)
                vector = event.embedding
    if vector is None:
        raise HeadraceError("The engine returned no embedding.", "Please report this mistake.")
    return vector


def _unit(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length else vector


def _base64(vector: list[float]) -> str:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
