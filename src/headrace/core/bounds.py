"""How large the lists and texts of one request may be: every bound, its number and its reason.

All of them are looked at before a list is walked or a text is read, by the rules of core/checks.py,
by the server's endpoints and by whoever else takes such from a caller. Those that an operator may
move are settings of core/server_config.py, which take these numbers as their defaults or their
limits. docs/bounds.md lists them all. Standard library only; knows no tokenizer, model or HTTP.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sized
from dataclasses import dataclass

from headrace.core.errors import BoundError

SHOWN_CHARACTERS = 100  # of a value in an error: who sent it has the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`most` of `what`; `name` is what metrics call it, so that there are as many as there are
    bounds, whatever clients send."""

    name: str
    most: int
    what: str
    why: str
    remedy: str = "Send fewer."

    def check(self, param: str, found: int, *, most: int | None = None, remedy: str = "") -> None:
        """Refuses more than there may be: `most`, where somebody moved it or knows better."""
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
    why="each is a sequence of the engine's, with blocks of its own",
    remedy="Ask for fewer.",
)
LOGPROBS = Bound(
    name="logprobs",
    most=20,
    what="alternatives",
    why="each comes with every token, and takes a hundred bytes of the answer",
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
    why="text that may be the beginning of one is held back and kept",
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
    remedy="Send a shorter one: words, not texts.",
)
STOP_TOKENS = Bound(
    name="stop_token_ids",
    most=1024,
    what="token ids",
    why="they are banned in every step before min_tokens; a model has a few that end a text",
)
ALLOWED_TOKENS = Bound(
    name="allowed_token_ids",
    most=1 << 20,  # a server knows the vocabulary, and takes no more than that
    what="token ids",
    why="more than the vocabulary has says nothing more",
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
    why="it is kept with the request and goes into its prefix keys; a hash has 64",
    remedy="Send a hash of it.",
)

# -- what a body holds -----------------------------------------------------------------------------

BODY_VALUES = Bound(
    name="body_values",
    most=65_536,
    what="texts, objects and lists",
    why="each takes JSON's reader a microsecond in which nobody else is answered",
    remedy="Send fewer, in several requests if need be.",
)
BODY_NUMBERS = Bound(
    name="body_numbers",
    most=1 << 20,
    what="numbers",
    why="each takes 32 bytes and more of memory; token ids come by the thousand",
    remedy="Send fewer, in several requests if need be.",
)
FIELDS = Bound(
    name="fields",
    most=8192,
    what="fields",
    why="every one that is not known is looked for among those that are",
    remedy="Leave out those that this server does not know.",
)
PROMPTS = Bound(
    name="prompts",
    most=128,
    what="prompts",
    why="each is a request of the engine's and takes a place in its queue",
    remedy="Send them in several requests.",
)
INPUTS = Bound(
    name="inputs",
    most=2048,  # as OpenAI's
    what="inputs",
    why="each is a request of the engine's",
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
    remedy="Send the last ones.",
)
PARTS = Bound(
    name="parts",
    most=16_384,
    what="parts and tool calls",
    why="each is checked, copied and rendered by the model's template",
    remedy="Put texts together.",
)
TOOLS = Bound(
    name="tools",
    most=128,  # as OpenAI's
    what="tools",
    why="each is a rule of the answer's grammar",
    remedy="Send those that may be of use.",
)
METADATA_PAIRS = Bound(
    name="metadata",
    most=64,  # four times OpenAI's
    what="pairs",
    why="they are kept with the response and sent back with every event of its state",
)
METADATA_CHARACTERS = Bound(
    name="metadata_characters",
    most=32_768,  # OpenAI's 16 pairs of 64 and 512, and as much again three times
    what="characters in all",
    why="they are kept with the response and sent back with every event of its state",
    remedy="Send less.",
)
SCHEMA_BYTES = Bound(
    name="schema",
    most=64 << 10,
    what="bytes",
    why="a grammar's compiler goes through all of it",
    remedy="Make it smaller.",
)
ECHOED_LOGPROBS = Bound(
    name="prompt_logprobs",
    most=1 << 20,
    what="logprobs of prompts in its answer (tokens x alternatives x choices)",
    why="an answer of 30 MB is made of so many, and all of it is in memory at once",
    remedy="Ask for fewer alternatives or choices, or send fewer prompts in one request.",
)
STORED_BYTES = Bound(
    name="stored_response",
    most=4 << 20,
    what="bytes",
    why="a conversation that is gone on with is read as a whole",
    remedy="Send the whole conversation as input items.",
)

ALL = tuple(each for each in list(globals().values()) if isinstance(each, Bound))


# -- reading without walking -----------------------------------------------------------------------

# A body smaller than this can't have too many of anything.
SMALL_BYTES = 1 << 17


def check_json(data: bytes, where: str) -> None:
    """Bounds what JSON's reader would make of some text, by counting bytes. What stands in texts
    does not count: where there may be too much, their insides are cut out first."""
    if len(data) < SMALL_BYTES:
        return
    if b"\\" in data:  # an escaped quote ends no text
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
    """A value in an error: its beginning, made without going through the rest."""
    text = _SHORT.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def counted(values: Sized, value: object) -> str:
    """A list of which one value is wrong: how many there are, and that one."""
    return f"{shown(value)} (one of {len(values)})" if len(values) > 1 else shown(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARACTERS
_SHORT.maxlevel = 3
