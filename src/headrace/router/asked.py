"""What the router reads of a request's body: how its prompt begins, whose it is, how large it is.

The body is scanned once, and only the fields below are taken out; text is not decoded and nothing
is tokenized. Tokens are estimated from bytes. A body that is no JSON object is not refused here:
its replica says what is wrong with it. Knows JSON; no replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.policies.prefixes import Prefixes, lengths
from headrace.policies.routing import key_of

BYTES_PER_TOKEN = 4  # of JSON text, roughly: pending tokens are compared, not billed
UNASKED_TOKENS = 256  # of an answer without max_tokens, as a key's limit counts it
LIKELY_TOKENS = 128  # the most that an answer is believed to have

Raw = msgspec.Raw


class _Body(msgspec.Struct):
    model: Any = None
    tools: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    user: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n_predict: Any = None
    n: Any = None
    cache_salt: Any = None
    previous_response_id: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    prefixes: Prefixes = ()  # hashes of the prompt's beginnings
    user: str | None = None
    model: str | None = None
    prompt_tokens: int = 1
    output_tokens: int = UNASKED_TOKENS
    continuations: int = 1
    is_object: bool = False  # the body is a JSON object
    has_salt: bool = False
    previous: str | None = None  # the stored answer that it continues

    @property
    def likely_tokens(self) -> int:
        """Of the answer. What a client allows is a limit and no guess: many allow thousands, and
        get a few hundred."""
        return min(self.output_tokens, LIKELY_TOKENS) * self.continuations


_decode = msgspec.json.Decoder(_Body).decode


def read_asked(body: bytes, prefix_bytes: int) -> Asked:
    prompt_tokens = 1 + len(body) // BYTES_PER_TOKEN
    try:
        sent = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return Asked(prompt_tokens=prompt_tokens)
    model = sent.model if isinstance(sent.model, str) else None
    previous = sent.previous_response_id
    most = (sent.max_completion_tokens, sent.max_tokens, sent.max_output_tokens, sent.n_predict)
    return Asked(
        prefixes=_prefixes(sent, model, prefix_bytes),
        user=sent.user if isinstance(sent.user, str) and sent.user else None,
        model=model,
        prompt_tokens=prompt_tokens,
        output_tokens=next((each for each in most if _is_count(each)), UNASKED_TOKENS),
        continuations=sent.n if _is_count(sent.n) and sent.n < 1024 else 1,
        is_object=True,
        has_salt=sent.cache_salt is not None,
        previous=previous if isinstance(previous, str) and previous else None,
    )


def _prefixes(sent: _Body, model: str | None, most_bytes: int) -> Prefixes:
    """In the order in which templates write them: what differs early differs from there on."""
    parts = map(bytes, (sent.tools, sent.system, sent.instructions, _prompt_of(sent)))
    text = b"".join([part[:most_bytes] for part in parts if part])[:most_bytes]
    hashed = blake2b(digest_size=8, key=(model or "").encode()[:64])
    found, at = [], 0
    for tokens in lengths(len(text) // BYTES_PER_TOKEN):
        end = tokens * BYTES_PER_TOKEN
        hashed.update(text[at:end])
        found.append((int.from_bytes(hashed.digest(), "little"), tokens))
        at = end
    return tuple(found)


def session_key(name: str) -> int:
    return key_of("session", name)


def _prompt_of(sent: _Body) -> Raw:
    for part in (sent.messages, sent.prompt, sent.input):
        if len(bytes(part)):
            return part
    return Raw()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
