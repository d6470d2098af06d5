"""Turns a request's messages or texts into token ids, in a thread where they are long.

Knows templates, tokenizers and how long a text may be; nothing of the rest of a request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from headrace.core.bounds import MESSAGES, PARTS
from headrace.core.context import check_fits_context, longest
from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.request import SamplingParams
from headrace.server.request.call import Call
from headrace.server.request.service import Service
from headrace.server.request.truncation import Truncation
from headrace.text import bad_token_ids
from headrace.tokenizer.tokenizer import LONG_CHARACTERS

T = TypeVar("T")

# Turns off the tokenizers library's own threads: they would take the engine's cores, and it warns
# at every fork after it has started some. We tokenize one text at a time in our threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LITTLE_ROOM_TOKENS = (
    256  # for an answer without max_tokens: with less room the client gets a warning
)

_TAKEN = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}


class ChatFields(Protocol):
    """The fields that a prompt is made from in a chat."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def documents(self) -> list[dict[str, Any]] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


async def encode_chat(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    fields: ChatFields,
    size_bytes: int,
    truncation: Truncation | None = None,
) -> list[int]:
    """The chat's token ids by the model's template. `size_bytes` is its rough size: the body's."""
    template = service.model.chat_template
    extra = fields.chat_template_kwargs or {}
    if taken := _TAKEN & extra.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs has {min(taken)!r}, which is a field of the request itself.",
            "Send it beside chat_template_kwargs, or leave it out.",
            param="chat_template_kwargs",
        )
    if fields.documents is not None:
        extra = {**extra, "documents": fields.documents}
    listed = [_known_message(message) for message in messages]  # bounded by check_messages
    if truncation is None:
        _check_length(service, sum(_characters(m.get("content")) for m in listed), "messages")
    ids = await off_loop(
        size_bytes,
        lambda: template.encode(
            listed,
            add_generation_prompt=_wants_generation_prompt(fields),
            continue_final_message=bool(fields.continue_final_message),
            tools=tools,
            **extra,
        ),
    )
    return ids if truncation is None else truncation.cut(ids)


async def encode_text(
    service: Service, text: str, *, add_bos: bool = True, truncation: Truncation | None = None
) -> list[int]:
    tokenizer = service.model.tokenizer
    if truncation is None:
        _check_length(service, len(text), "prompt")
    else:
        text = truncation.cut_text(text, tokenizer.longest_token_characters)
    ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_bos=add_bos))
    if truncation is None:
        return ids
    has_bos = bool(ids) and ids[0] == tokenizer.bos_id  # a bos token typed by a user is plain text
    return truncation.cut(ids, kept_first=int(has_bos))


def check_messages(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> None:
    """Bounds the number of messages and their parts before they are processed."""
    MESSAGES.check(param, len(messages))
    parts = 0
    for message in messages:
        for name in ("content", "tool_calls", "output"):
            value = message.get(name) if isinstance(message, Mapping) else None
            if isinstance(value, list):
                parts += len(value)
    PARTS.check(param, parts)


async def encode_bad_words(service: Service, params: SamplingParams) -> list[list[int]]:
    """Called once for all prompts of a request."""
    words = params.bad_words
    if not words:
        return []
    tokenizer = service.model.tokenizer
    return await off_loop(2 * sum(map(len, words)), lambda: bad_token_ids(tokenizer, words))


def check_fits(
    service: Service,
    prompt_tokens: int,
    *,
    max_tokens: int | None = None,
    max_tokens_name: str = "max_tokens",
    where: str = "prompt",
) -> None:
    """The engine's check, but before any prompt of the same request runs, and with the request's
    own field names."""
    check_fits_context(
        prompt_tokens=prompt_tokens,
        context_tokens=service.context_tokens,
        max_tokens=max_tokens,
        max_tokens_name=max_tokens_name,
        where=where,
    )


def warn_of_little_room(
    service: Service, call: Call, prompt_tokens: int, wanted_tokens: int
) -> None:
    """Warns if no max_tokens was given and the context leaves little room for the answer."""
    room_tokens = service.context_tokens - prompt_tokens
    if room_tokens < wanted_tokens:
        call.warn(
            f"the context of {service.context_tokens} tokens leaves room for {room_tokens} of an "
            "answer"
        )


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do the work, in a thread if it is long: more than a few milliseconds would delay every other
    stream. It should consist of many small steps: one long C call that holds Python's global lock
    would delay them from a thread too."""
    return work() if size <= LONG_CHARACTERS else await asyncio.to_thread(work)


def _wants_generation_prompt(fields: ChatFields) -> bool:
    if fields.continue_final_message and fields.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message are both true; expected at most one: "
            "an answer is either new or continues the last message.",
            "Set one of them to false.",
            param="continue_final_message",
        )
    if fields.add_generation_prompt is None:
        return not fields.continue_final_message
    return fields.add_generation_prompt


def _known_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces OpenAI's newer role names with those that templates know."""
    role, content = message.get("role"), message.get("content")
    if role == "developer":
        return {**message, "role": "system"}
    if role == "assistant" and content is None and not message.get("tool_calls"):
        # A turn without content, or a refusal.
        return {**message, "content": message.get("refusal") or ""}
    if "name" in message and not isinstance(message["name"], str | None):
        raise InvalidRequestError(
            f"A message's name is a {type(message['name']).__name__}; expected text.",
            "Send the participant's name as text, or leave it out.",
            param="messages.name",
        )
    return message


def _characters(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return sum(len(text) for text in texts if isinstance(text, str))


def _check_length(service: Service, characters: int, param: str) -> None:
    """Refuses a text that can't fit before it is tokenized, which would take seconds."""
    facts = service.supervisor.facts
    if facts is None:  # the engine is starting: the error for that comes later
        return
    context = facts.context_tokens
    least = characters // service.model.tokenizer.longest_token_characters
    if least >= context:
        raise ContextLengthError(
            f"{longest(context)} However, your {param} has {characters} characters, which are "
            f"{least} tokens or more.",
            f"Shorten the {param}.",
            param=param,
            prompt_tokens=least,
            most_tokens=context - 1,
        )
