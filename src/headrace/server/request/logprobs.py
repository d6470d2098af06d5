"""Logprobs in OpenAI's two shapes: a chat's list of tokens, a completion's parallel lists.

Knows tokens and their bytes; nothing of requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import cast

import msgspec

from headrace.core.request import Logprob, Logprobs, RequestOutput
from headrace.server.request.call import encode_list
from headrace.tokenizer.detokenize import StreamDetokenizer
from headrace.tokenizer.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # as in OpenAI's API: JSON has no minus infinity


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]  # the token's own, which may be only a part of a character's
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


def chat_logprobs(tokenizer: Tokenizer, found: Iterable[tuple[int, Logprobs]]) -> ChatLogprobs:
    """For each sampled token: its logprob, and the most likely alternatives."""
    content = []
    for token_id, here in found:
        top = [TopLogprob(*_shown(tokenizer, other, p)) for other, p in _ranked(here)]
        content.append(TokenLogprob(*_shown(tokenizer, token_id, here[token_id].logprob), top))
    return ChatLogprobs(content)


def encoded(found: ChatLogprobs) -> ChatLogprobs:
    """Encodes to the same JSON, but its list is encoded already, since it may be long."""
    content = msgspec.Raw(b"[%b]" % encode_list(found.content))
    return ChatLogprobs(cast("list[TokenLogprob]", content))


def answer_entries(output: RequestOutput) -> int:
    """Roughly how many tokens and logprobs of an answer are to be encoded."""
    entries = len(output.prompt_token_ids)
    for listed in (output.prompt_logprobs, *(each.logprobs for each in output.outputs)):
        if listed and listed[-1] is not None:
            entries += len(listed) * len(listed[-1])
    return entries + sum(len(each.token_ids) for each in output.outputs)


def _shown(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    text, _ = tokenizer.shown(token_id)
    return text, max(logprob, LEAST_LOGPROB), list(tokenizer.token_bytes(token_id))


def _ranked(here: Logprobs) -> list[tuple[int, float]]:
    listed = [(p.rank, token_id, p.logprob) for token_id, p in here.items() if p.rank is not None]
    return [(token_id, logprob) for _, token_id, logprob in sorted(listed)]


PromptLogprobs = list[dict[str, Logprob] | None]  # vLLM's shape; by token id, as text for JSON


def prompt_logprobs(found: list[Logprobs | None] | None) -> PromptLogprobs:
    """For each token of a prompt: its logprob and the most likely alternatives; null for the first.
    Encoded as JSON already, since it may be long."""
    return cast("PromptLogprobs", msgspec.Raw(b"[%b]" % encode_list(_prompt_logprobs(found))))


def _prompt_logprobs(found: list[Logprobs | None] | None) -> PromptLogprobs:
    return [
        None if here is None else {str(token_id): _finite(p) for token_id, p in here.items()}
        for here in found or [None]
    ]


def _finite(found: Logprob) -> Logprob:
    if found.logprob >= LEAST_LOGPROB:
        return found
    return dataclasses.replace(found, logprob=LEAST_LOGPROB)


class CompletionLogprobs(msgspec.Struct):
    """Lists of equal length with one entry per token, including the prompt's if it is echoed."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []  # null for a prompt's first token
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


_LISTS = CompletionLogprobs.__struct_fields__
_NONE = (b"",) * len(_LISTS)


class EchoedPrompt(msgspec.Struct, frozen=True):
    """An echoed prompt's logprobs, as the JSON that every choice begins with: encoded once for all
    choices. The lists are without their brackets."""

    lists: tuple[bytes, ...]
    characters: int  # of its text

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, ids: list[int], text: str, found: list[Logprobs | None]
    ) -> EchoedPrompt:
        writer = CompletionLogprobsWriter(tokenizer, continuation=False)
        for token_id, here in zip(ids, found, strict=True):
            writer.add(token_id, here)
        return cls(writer.take_lists(), len(text))


class CompletionLogprobsWriter:
    """Collects logprobs for one choice; `take` returns those since the last call. Offsets are where
    each token's text begins (or would) in the choice's whole text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        echoed: EchoedPrompt | None = None,
        *,
        continuation: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = StreamDetokenizer(tokenizer, continuation=continuation)
        self._place = 0 if echoed is None else echoed.characters
        self._before = _NONE if echoed is None else echoed.lists
        self._new = CompletionLogprobs()

    def add(self, token_id: int, here: Logprobs | None) -> None:
        self._new.tokens.append(self._named(token_id))
        self._new.text_offset.append(self._place)
        self._place += len(self._detokenizer.push(token_id))
        if here is None:
            self._new.token_logprobs.append(None)
            self._new.top_logprobs.append(None)
            return
        self._new.token_logprobs.append(max(here[token_id].logprob, LEAST_LOGPROB))
        top = dict(_ranked(here))
        top.setdefault(token_id, here[token_id].logprob)
        self._new.top_logprobs.append(
            {self._named(other): max(logprob, LEAST_LOGPROB) for other, logprob in top.items()}
        )

    def take(self) -> bytes:
        """CompletionLogprobs, as JSON."""
        before, self._before = self._before, _NONE
        both = zip(before, self.take_lists(), strict=True)
        lists = zip(_LISTS, [b",".join(filter(None, each)) for each in both], strict=True)
        return b"{%b}" % b",".join(b'"%b":[%b]' % (name.encode(), each) for name, each in lists)

    def take_lists(self) -> tuple[bytes, ...]:
        new, self._new = self._new, CompletionLogprobs()
        return tuple(encode_list(getattr(new, name)) for name in _LISTS)

    def _named(self, token_id: int) -> str:
        """OpenAI's text for a token. It is a key: tokens with parts of characters must differ."""
        text, is_text = self._tokenizer.shown(token_id)
        return text if is_text else f"bytes:{text}"
