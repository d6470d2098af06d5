"""Attacks by work: single valid requests that cost more than they should (rows 1 to 4 of the table
in benchmarks/README.md), and others of the same kind that were looked for since.

An attack gets a server that is warm and tells what its requests came to. Knows what to send; how
the harm is measured is attacks.py's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import attack_wire
import fuzz_grammars
from attacked_server import AttackedServer
from fuzz_bodies import CHAT, COMPLETIONS, DETOKENIZE, EMBEDDINGS, MESSAGES, RESPONSES, TOKENIZE

HI = [{"role": "user", "content": "Hi"}]
KV_TOKENS = 8192
FLAGS = ("--kv-tokens", str(KV_TOKENS))


@dataclass(slots=True)
class Outcome:
    """What the attacker got."""

    statuses: Counter[str] = field(default_factory=Counter)
    note: str = ""
    succeeded: bool | None = None  # where it is a question of yes or no

    def count(self, answer: attack_wire.Answer | BaseException) -> None:
        if isinstance(answer, attack_wire.Answer):
            self.statuses[str(answer.status)] += 1
        else:
            self.statuses[type(answer).__name__] += 1


@dataclass(slots=True)
class Target:
    server: AttackedServer
    outcome: Outcome
    bound_s: float
    key: str | None = None  # the attacker's

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return () if self.key is None else (("authorization", f"Bearer {self.key}"),)

    async def ask(self, path: str, body: Any) -> attack_wire.Answer | None:
        """Counted; None where nothing came."""
        try:
            answer = await attack_wire.ask(
                self.port, path, body, *self.headers, limit_s=self.bound_s
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            self.outcome.count(error)
            return None
        self.outcome.count(answer)
        return answer

    async def ask_together(self, path: str, bodies: list[Any]) -> None:
        await asyncio.gather(*(self.ask(path, body) for body in bodies))


Act = Callable[[Target], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    name: str
    row: str
    what: str
    act: Act
    flags: tuple[str, ...] = FLAGS
    after_s: float = 5.0  # watched on, for harm that stays
    keys: str = ""  # of a keys file; the attacker's is "attacker", the honest client's "honest"
    most_descriptors: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    planted: bool = False  # in a folder with a module that is not ours


def one(path: str, make: Callable[[], Any], times: int = 1) -> Act:
    """The same request, so many at once."""

    async def act(target: Target) -> None:
        body = json.dumps(make(), separators=(",", ":")).encode()
        await target.ask_together(path, [body] * times)

    return act


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 8, **more}


def schema_patterns() -> dict[str, Any]:
    parts = [{"pattern": f".*a{{{place}}}.{{5}}"} for place in range(1, 31)]
    return {"type": "string", "allOf": parts}


def pattern_properties(offset: int = 0) -> dict[str, Any]:
    names: dict[str, Any] = {f"^k{place + offset:04}.*x$": {} for place in range(1900)}
    return {"type": "object", "patternProperties": names}


async def _hold_places(target: Target) -> None:
    bodies = [chat(guided_json=pattern_properties(offset)) for offset in (0, 2000)]
    await target.ask_together(CHAT, bodies)


async def ambiguous(target: Target, tokens: int = 200) -> None:
    # The longest token that is letters a: the parser's work grows with the text.
    found = await attack_wire.ask(
        target.port, TOKENIZE, {"prompt": "a" * 64, "add_special_tokens": False}, *target.headers
    )
    letter = str(found.json()["tokens"][0])
    body = chat(
        guided_grammar=fuzz_grammars.AMBIGUOUS, n=16, logit_bias={letter: 100}, ignore_eos=True
    )
    await target.ask(CHAT, body | {"max_tokens": tokens})


def _long_prompts(count: int) -> list[list[int]]:
    chooser = random.Random(5)
    return [[chooser.randrange(100, 49_000) for _ in range(4000)] for _ in range(count)]


def texts() -> list[str]:
    return [f"{place} " + "mill wheel " * 353 for place in range(2048)]


def _lists(name: str, **more: Any) -> Callable[[], Any]:
    return lambda: chat(**{name: [5] * 4_100_000}, **more)


WORK = (
    Attack(
        name="schema-patterns",
        row="1",
        what="a 1.3 kB schema of 30 patterns, twice",
        act=one(CHAT, lambda: chat(guided_json=schema_patterns()), 2),
        after_s=30,
    ),
    Attack(
        name="lark-intersections",
        row="1",
        what="a Lark grammar with 200 intersections, twice",
        act=one(CHAT, lambda: chat(guided_grammar=fuzz_grammars.intersections(200)), 2),
        after_s=30,
    ),
    Attack(
        name="compile-places",
        row="1",
        what="two schemas of 1,900 patternProperties; others' grammars",
        act=_hold_places,
        after_s=30,
    ),
    Attack(
        name="ambiguous-grammar",
        row="2",
        what="a 29-byte ambiguous grammar, n=16 and a bias",
        act=ambiguous,
    ),
    Attack(
        name="allowed-ids",
        row="3",
        what="three requests of 4.1M allowed_token_ids, n=16",
        act=one(CHAT, _lists("allowed_token_ids", n=16), 3),
        after_s=30,
    ),
    Attack(
        name="bad-words-steps",
        row="3",
        what="64 bad words of 1,000 tokens each, n=16, 200 steps",
        act=one(CHAT, lambda: chat(bad_words=["a b " * 500] * 64, n=16) | {"max_tokens": 200}),
    ),
    Attack(
        name="stop-strings",
        row="4",
        what="16 stop strings of 500 kB, 100 tokens",
        act=one(CHAT, lambda: chat(stop=["a" * 500_000] * 16) | {"max_tokens": 100}),
        after_s=30,
    ),
    Attack(
        name="echo-logprobs",
        row="4",
        what="echo with logprobs 20 and n=16 over 4,000 tokens",
        act=one(COMPLETIONS, lambda: _echo(_long_prompts(1)[0])),
    ),
    Attack(
        name="echo-logprobs-many",
        row="4",
        what="the same over 4 prompts",
        act=one(COMPLETIONS, lambda: _echo(_long_prompts(4))),
        after_s=30,
    ),
    Attack(
        name="bad-words",
        row="4",
        what="64 bad words of 120 kB",
        act=one(CHAT, lambda: chat(bad_words=["b" * 120_000] * 64)),
    ),
    Attack(
        name="embeddings",
        row="4",
        what="2,048 embeddings of 3.9 kB",
        act=one(EMBEDDINGS, lambda: {"input": texts()}),
        after_s=30,
    ),
    Attack(
        name="stop-ids",
        row="4",
        what="4.1M stop_token_ids",
        act=one(CHAT, _lists("stop_token_ids")),
    ),
    Attack(
        name="logit-bias",
        row="4",
        what="logit_bias of 600,000 ids",
        act=one(CHAT, lambda: chat(logit_bias={str(n): 1 for n in range(600_000)})),
    ),
    # Of the same kind, not in the table.
    Attack(
        name="many-messages",
        row="+",
        what="150,000 messages",
        act=one(CHAT, lambda: chat() | {"messages": HI * 150_000}),
    ),
    Attack(
        name="many-parts",
        row="+",
        what="one message of 200,000 text parts",
        act=one(CHAT, lambda: chat() | {"messages": [_parts(200_000)]}),
    ),
    Attack(
        name="many-items",
        row="+",
        what="/v1/responses with 120,000 items",
        act=one(RESPONSES, lambda: {"input": [{"type": "message", **HI[0]}] * 120_000}),
    ),
    Attack(
        name="many-blocks",
        row="+",
        what="/v1/messages with 150,000 turns",
        act=one(MESSAGES, lambda: {"max_tokens": 8, "messages": HI * 150_000}),
    ),
    Attack(
        name="many-tools",
        row="+",
        what="50,000 tools",
        act=one(CHAT, lambda: chat(tools=[_tool(place) for place in range(50_000)])),
    ),
    Attack(
        name="unknown-fields",
        row="+",
        what="500,000 unknown fields",
        act=one(CHAT, lambda: chat(**{f"x{place}": 1 for place in range(500_000)})),
    ),
    Attack(
        name="long-text",
        row="+",
        what="/tokenize with a text of 8 MB, strings asked for",
        act=one(TOKENIZE, lambda: {"prompt": "mill " * 1_600_000, "return_token_strs": True}),
        after_s=30,
    ),
    Attack(
        name="many-ids",
        row="+",
        what="/detokenize with 2.7M ids",
        act=one(DETOKENIZE, lambda: {"tokens": [57] * 2_700_000}),
        after_s=30,
    ),
    Attack(
        name="many-choices",
        row="+",
        what="guided_choice of 700,000",
        act=one(CHAT, lambda: chat(guided_choice=[f"{n:07}" for n in range(700_000)])),
    ),
    Attack(
        name="template-arguments",
        row="+",
        what="chat_template_kwargs of 400,000 names, and documents",
        act=one(CHAT, lambda: chat(chat_template_kwargs={f"x{n}": 1 for n in range(400_000)})),
    ),
)


def _echo(prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1}


def _parts(count: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "a"}] * count}


def _tool(place: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{place}", "parameters": {}}}
