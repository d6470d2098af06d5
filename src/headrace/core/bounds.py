"""How large the lists and texts of one request may be: every bound, its number and its reason.

Each is checked before a list is iterated over or a text is read: by the rules of core/checks.py, by
the server's endpoints, and by any other code that takes such values from a caller. The bounds that
an operator may change are settings in core/server_config.py, which use these numbers as defaults or
limits. docs/bounds.md lists them all. Standard library only; knows no tokenizer, model or HTTP.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sized
from dataclasses import dataclass

from headrace.core.errors import BoundError

SHOWN_CHARACTERS = 100  # of a value in an error message; the sender knows the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """At most `most` of `what`. `name` is the label in metrics, so that the number of labels does
    not depend on what clients send."""

    name: str
    most: int
    what: str
    why: str
    remedy: str = "Send fewer."

    def check(self, param: str, found: int, *, most: int | None = None, remedy: str = "") -> None:
        """Raises BoundError if `found` is above the bound. `most` replaces the default bound where
        an operator changed it or the caller knows a tighter one."""
        limit = self.most if most is None else most
        if found > limit:
            takes = "expected" if most is None else "this server takes"
            raise BoundError(
                f"{param} has {found} {self.what}; {takes} at most {limit}.",
                remedy or self.remedy,
                param=param,
                bound=self.name,
            )


# -- how answers are made --------------------------------------------------------------------------

CONTINUATIONS = Bound(
    name="n",
    most=64,
    what="continuations",
    why="each is a sequence in the engine, with its own KV blocks",
    remedy="Ask for fewer.",
)
LOGPROBS = Bound(
    name="logprobs",
    most=20,
    what="alternatives",
    why="each is returned with every token, and takes about a hundred bytes of the answer",
    remedy="Ask for fewer.",
)
STOP_STRINGS = Bound(
    name="stop",
    most=16,
    what="stop strings",
    why="each is compared with every character of every continuation",
)
STOP_CHARACTERS = Bound(
    name="stop_characters",
    most=4096,
    what="characters in one stop string",
    why="text that may be the beginning of a stop string is held back in memory",
    remedy="Send a shorter one: its first words are enough.",
)
BAD_WORDS = Bound(
    name="bad_words",
    most=64,
    what="words",
    why="each is compared with the end of every sequence in every step",
)
BAD_WORD_CHARACTERS = Bound(
    name="bad_word_characters",
    most=1024,
    what="characters in one word",
    why="each is tokenized twice before the request begins",
    remedy="Send a shorter one: a word or a phrase, not a whole text.",
)
STOP_TOKENS = Bound(
    name="stop_token_ids",
    most=1024,
    what="token ids",
    why="they are banned in every step before min_tokens; a model has only a few end tokens",
)
ALLOWED_TOKENS = Bound(
    name="allowed_token_ids",
    most=1 << 20,  # a server lowers it to the size of the vocabulary
    what="token ids",
    why="a list longer than the vocabulary must contain duplicates",
    remedy="Send each id once.",
)
BIASED_TOKENS = Bound(
    name="logit_bias",
    most=16_384,
    what="tokens",
    why="each is added to the logits of every continuation in every step",
    remedy="Bias fewer, or send allowed_token_ids.",
)
CACHE_SALT_CHARACTERS = Bound(
    name="cache_salt",
    most=1024,
    what="characters",
    why="it is kept with the request and hashed into its prefix keys; a SHA-256 in hex has 64",
    remedy="Send a hash of it.",
)

# -- what a body holds -----------------------------------------------------------------------------

BODY_VALUES = Bound(
    name="body_values",
    most=65_536,
    what="texts, objects and lists",
    why="each takes the JSON parser about a microsecond, during which no other request is served",
    remedy="Send fewer, in several requests if need be.",
)
BODY_NUMBERS = Bound(
    name="body_numbers",
    most=1 << 20,
    what="numbers",
    why="each takes at least 32 bytes of memory; lists of token ids have thousands",
    remedy="Send fewer, in several requests if need be.",
)
FIELDS = Bound(
    name="fields",
    most=8192,
    what="fields",
    why="each unknown field is compared with the known ones to suggest a spelling",
    remedy="Leave out fields that this server does not know.",
)
PROMPTS = Bound(
    name="prompts",
    most=128,
    what="prompts",
    why="each is a separate request to the engine and takes a place in its queue",
    remedy="Send them in several requests.",
)
INPUTS = Bound(
    name="inputs",
    most=2048,  # as OpenAI's
    what="inputs",
    why="each is a separate request to the engine",
    remedy="Send them in several requests.",
)
INPUT_TOKENS = Bound(
    name="input_tokens",
    most=300_000,  # as OpenAI's
    what="tokens in all",
    why="one call would keep the engine busy for minutes",
    remedy="Send the inputs in several requests.",
)
MESSAGES = Bound(
    name="messages",
    most=8192,
    what="messages",
    why="each is rendered by the model's template",
    remedy="Send only the most recent messages.",
)
PARTS = Bound(
    name="parts",
    most=16_384,
    what="parts and tool calls",
    why="each is checked, copied and rendered by the model's template",
    remedy="Join text parts into fewer, longer ones.",
)
TOOLS = Bound(
    name="tools",
    most=128,  # as OpenAI's
    what="tools",
    why="each is a rule of the answer's grammar",
    remedy="Send only the tools that this request may need.",
)
METADATA_PAIRS = Bound(
    name="metadata",
    most=64,  # four times OpenAI's
    what="pairs",
    why="they are kept with the response and sent back with every event of its state",
)
METADATA_CHARACTERS = Bound(
    name="metadata_characters",
    most=32_768,  # four times OpenAI's 16 pairs, whose keys have 64 characters and values 512
    what="characters in all",
    why="they are kept with the response and sent back with every event of its state",
    remedy="Send less.",
)
SCHEMA_BYTES = Bound(
    name="schema",
    most=64 << 10,
    what="bytes",
    why="the grammar compiler reads all of it",
    remedy="Make it smaller.",
)
ECHOED_LOGPROBS = Bound(
    name="prompt_logprobs",
    most=1 << 20,
    what="logprobs of prompts in its answer (tokens x alternatives x choices)",
    why="so many make an answer of 30 MB, which is held in memory as a whole",
    remedy="Ask for fewer alternatives or choices, or send fewer prompts in one request.",
)
STORED_BYTES = Bound(
    name="stored_response",
    most=4 << 20,
    what="bytes",
    why="continuing a stored conversation reads all of it",
    remedy="Send the whole conversation as input items.",
)

ALL = tuple(each for each in list(globals().values()) if isinstance(each, Bound))


# -- checks that do not parse ----------------------------------------------------------------------

# A body smaller than this can't have too many of anything.
SMALL_BYTES = 1 << 17


def check_json(data: bytes, where: str) -> None:
    """Bounds how many values a JSON parser would create, by counting bytes. Characters inside of
    strings do not count: where the first count is too high, strings are cut out and counted again.
    """
    if len(data) < SMALL_BYTES:
        return
    if b"\\" in data:  # an escaped quote does not end a string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = data.count(b'"') // 2
    BODY_VALUES.check(where, texts)
    lists, commas = _count(data)
    if texts + lists > BODY_VALUES.most or commas - texts - lists > BODY_NUMBERS.most:
        lists, commas = _count(b"".join(data.split(b'"')[::2]))
    BODY_VALUES.check(where, texts + lists)
    BODY_NUMBERS.check(where, commas - texts - lists)  # a comma follows each of those too


def _count(data: bytes) -> tuple[int, int]:
    return data.count(b"[") + data.count(b"{"), data.count(b",")


def shown(value: object) -> str:
    """The beginning of a value, for an error message. Does not format the rest of it."""
    text = _SHORT.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def counted(values: Sized, value: object) -> str:
    """The wrong value of a list, and how many values the list has."""
    return f"{shown(value)} (one of {len(values)})" if len(values) > 1 else shown(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARACTERS
_SHORT.maxlevel = 3
