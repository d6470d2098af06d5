"""Requests whose answers say by themselves whether they are right, alone or beside any others.

A case is a body and a function that looks at the answer, or raises Wrong. Log-probabilities that
come back are the model's own, unadjusted and at temperature 1: they show whether a filter held.
Needs a server only for the greedy answer that some cases are made of.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from checks.replies import Body, Choice, Reply, ask, fetch

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "Name a river and say three things about it."
TOKENS = 32
_SLACK = 1e-3  # of log-probabilities: floats, and two tokens may be as likely


class Wrong(Exception):
    """How an answer is not as it should be."""


Look = Callable[[Reply], str]  # raises Wrong, or says what is worth knowing


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    path: str
    body: Body
    look: Look
    choices: int = 1
    is_settled: bool = False  # greedy or seeded: asked again alone, the same text


def verify(case: Case, reply: Reply) -> str:
    if sorted(reply.choices) != list(range(case.choices)):
        raise Wrong(f"choices {sorted(reply.choices)}; expected {case.choices} of them")
    for choice in reply.choices.values():
        if choice.finish_reason not in ("stop", "length"):
            raise Wrong(f"finish_reason is {choice.finish_reason!r}")
    return case.look(reply)


def make_cases(port: int) -> list[Case]:
    """Ids and words are taken from what the server says of its own model."""
    greedy = ask(port, CHAT, chat(temperature=0, ignore_eos=True))
    return [
        *sampling_cases(),
        *penalty_cases(),
        *token_cases(port, greedy.first),
        *ending_cases(greedy.first.text),
        *logprob_cases(),
        *grammar_cases(),
    ]


def chat(**how: Any) -> Body:
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, **how}


def shown(text: str) -> str:
    return json.dumps(text if len(text) < 40 else text[:37] + "...")


# Sampling


def sampling_cases() -> list[Case]:
    ranked = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True}

    def case(name: str, look: Look, **how: Any) -> Case:
        settled = how.get("temperature") == 0 or "seed" in how or how.get("top_k") == 1
        return Case(name, CHAT, chat(**ranked, **how), look, is_settled=settled)

    return [
        case("greedy", each_token(is_likeliest), temperature=0),
        case("temperature 1", each_token(is_listed_or_less), temperature=1, top_p=1),
        case("temperature 0.7, seed", each_token(is_listed_or_less), temperature=0.7, seed=3),
        case("top_k 1", each_token(is_likeliest), temperature=1, top_p=1, top_k=1),
        case("top_k 5", each_token(is_among(5)), temperature=1, top_p=1, top_k=5),
        case("top_k 5000", each_token(is_listed_or_less), temperature=1.5, top_p=1, top_k=5000),
        case("top_k 40000", each_token(is_listed_or_less), temperature=1.5, top_p=1, top_k=40000),
        case("top_p 0.5", each_token(is_in_nucleus(0.5)), temperature=1, top_p=0.5),
        case("top_p 0.95", each_token(is_in_nucleus(0.95)), temperature=1, top_p=0.95),
        case("min_p 0.1", each_token(is_at_least(0.1)), temperature=1, top_p=1, min_p=0.1),
        case("typical_p 0.5", each_token(is_listed_or_less), temperature=1, top_p=1, typical_p=0.5),
        case(
            "all filters, seed",
            each_token(is_among(10)),
            **{"temperature": 1, "top_p": 0.9, "top_k": 10, "min_p": 0.02, "typical_p": 0.9},
            seed=5,
        ),
        Case("n 4", CHAT, chat(temperature=1, top_p=1, n=4, ignore_eos=True), differ, choices=4),
        Case(
            "n 4, seed",
            CHAT,
            chat(temperature=1, top_p=1, n=4, seed=9, ignore_eos=True),
            differ,
            choices=4,
            is_settled=True,
        ),
    ]


Top = Sequence[tuple[str, float]]
Judge = Callable[[str, float, Top], str]  # of a drawn token; what is wrong with it, or nothing


def each_token(judge: Judge) -> Look:
    def look(reply: Reply) -> str:
        tokens = reply.first.tokens
        if len(tokens) != TOKENS or reply.completion_tokens != TOKENS:
            raise Wrong(
                f"{len(tokens)} tokens, {reply.completion_tokens} by usage; asked: {TOKENS}"
            )
        for place, token in enumerate(tokens):
            if said := check_list(token.top, 20) or judge(token.text, token.logprob, token.top):
                raise Wrong(f"token {place}, {token.text!r}: {said}")
        return shown(reply.first.text)

    return look


def check_list(top: Top, count: int) -> str:
    values = [logprob for _, logprob in top]
    if len(values) != count:
        return f"{len(values)} alternatives; asked: {count}"
    if values != sorted(values, reverse=True):
        return "alternatives are not in order"
    if sum(map(math.exp, values)) > 1 + _SLACK or values[0] > _SLACK:
        return "alternatives are likelier than certain"
    return ""


def is_likeliest(text: str, logprob: float, top: Top) -> str:
    return "" if logprob >= top[0][1] - _SLACK else f"{logprob:.3f}; likeliest is {top[0]}"


def is_listed_or_less(text: str, logprob: float, top: Top) -> str:
    """Not listed, and yet likelier than one that is?"""
    is_listed = any(text == other for other, _ in top)
    return "" if is_listed or logprob <= top[-1][1] + _SLACK else f"{logprob:.3f} is not listed"


def is_among(count: int) -> Judge:
    def judge(text: str, logprob: float, top: Top) -> str:
        least = top[count - 1][1]
        return "" if logprob >= least - _SLACK else f"{logprob:.3f}; top_k leaves {least:.3f}"

    return judge


def is_in_nucleus(share: float) -> Judge:
    def judge(text: str, logprob: float, top: Top) -> str:
        # What is likelier than it, and by more than two backends could disagree about.
        before = sum(math.exp(other) for _, other in top if other > logprob + _SLACK)
        return "" if before < share + _SLACK else f"{before:.3f} lie before it, top_p is {share}"

    return judge


def is_at_least(share: float) -> Judge:
    def judge(text: str, logprob: float, top: Top) -> str:
        least = top[0][1] + math.log(share)
        return "" if logprob >= least - _SLACK else f"{logprob:.3f}; min_p leaves {least:.3f}"

    return judge


def differ(reply: Reply) -> str:
    texts = [choice.text for choice in reply.choices.values()]
    if len(set(texts)) == 1:
        raise Wrong(f"all {len(texts)} choices are {shown(texts[0])}")
    if reply.completion_tokens != len(texts) * TOKENS:
        raise Wrong(f"{reply.completion_tokens} tokens; asked: {len(texts)} x {TOKENS}")
    return f"{len(set(texts))} texts of {len(texts)}"


# Penalties


def penalty_cases() -> list[Case]:
    """Of a text that repeats itself: greedily continued with a penalty, fewer words come back."""
    text = "river " * 12 + "mill " * 6 + "river mill river mill river"

    def less_often(reply: Reply) -> str:
        tokens = [token.text for token in reply.first.tokens]
        most, count = Counter(tokens).most_common(1)[0]
        if count > len(tokens) // 4:
            raise Wrong(f"{most!r} came {count} times in {len(tokens)} tokens")
        return f"at most {count} times the same; {shown(reply.first.text)}"

    def case(name: str, look: Look, **how: Any) -> Case:
        body = {"prompt": text, "max_tokens": TOKENS, "logprobs": 1, "ignore_eos": True, **how}
        return Case(name, COMPLETIONS, body, look, is_settled=True)

    return [
        case("frequency_penalty 2", less_often, temperature=0, frequency_penalty=2.0),
        case("presence_penalty 2", answered, temperature=0, presence_penalty=2.0),
        case("repetition_penalty 2", less_often, temperature=0, repetition_penalty=2.0),
        case(
            "all penalties, temperature 1, seed",
            less_often,
            **{"temperature": 1, "top_p": 1, "seed": 4, "repetition_penalty": 1.5},
            **{"presence_penalty": 1.0, "frequency_penalty": 1.5},
        ),
        case("a negative penalty", answered, temperature=0, frequency_penalty=-2.0),
    ]


def answered(reply: Reply) -> str:
    if reply.completion_tokens != TOKENS:
        raise Wrong(f"{reply.completion_tokens} tokens; asked: {TOKENS}")
    return shown(reply.first.text)


# Tokens that may or may not come


def ids_of(port: int, text: str) -> list[int]:
    found = fetch(port, "/tokenize", {"prompt": text, "add_special_tokens": False})
    ids: list[int] = found["tokens"]
    return ids


def token_cases(port: int, greedy: Choice) -> list[Case]:
    allowed_words = (" yes", " no", " perhaps")
    allowed = [ids_of(port, word)[0] for word in allowed_words]
    first_id = ids_of(port, greedy.text)[0]
    more: Body = {"ignore_eos": True, "temperature": 1, "top_p": 1}

    def only_allowed(reply: Reply) -> str:
        rest = re.sub("|".join(allowed_words), "", reply.first.text)
        if rest or not reply.first.text:
            raise Wrong(f"{shown(reply.first.text)} has more than {allowed_words}")
        return shown(reply.first.text)

    def only_odd(reply: Reply) -> str:
        known = [ids for t in reply.first.tokens if len(ids := ids_of(port, t.text)) == 1]
        if even := [ids for ids in known if ids[0] % 2 == 0]:
            raise Wrong(f"{len(even)} tokens have an even id: {even[:3]}")
        return f"{len(known)} of {len(reply.first.tokens)} tokens seen to have an odd id"

    def all_river(reply: Reply) -> str:
        if reply.first.text != " river" * TOKENS:
            raise Wrong(shown(reply.first.text))
        return shown(reply.first.text)

    def begins_otherwise(reply: Reply) -> str:
        if ids_of(port, reply.first.text)[0] == first_id:
            raise Wrong(f"begins with a token of bias -100: {shown(reply.first.text)}")
        return shown(reply.first.text)

    odd = list(range(1, 49152, 2))
    river = str(ids_of(port, " river")[0])
    return [
        Case("allowed_token_ids, 3", CHAT, chat(**more, allowed_token_ids=allowed), only_allowed),
        Case(
            "allowed_token_ids, half of all",
            CHAT,
            chat(**more, allowed_token_ids=odd, logprobs=True),
            only_odd,
        ),
        Case("logit_bias +100", CHAT, chat(**more, logit_bias={river: 100}), all_river),
        Case(
            "logit_bias -100",
            CHAT,
            chat(temperature=0, ignore_eos=True, logit_bias={str(first_id): -100}),
            begins_otherwise,
            is_settled=True,
        ),
    ]


# Where an answer ends


def ending_cases(greedy_text: str) -> list[Case]:
    words = greedy_text.split()
    stop = " " + words[5]
    bad = next(word for word in words[3:] if word.isalpha() and len(word) > 2)
    until = greedy_text.partition(stop)[0]

    def stopped(reply: Reply) -> str:
        if stop in reply.first.text or reply.first.finish_reason != "stop":
            raise Wrong(f"{shown(reply.first.text)} for the stop string {stop!r}")
        return f"{stop!r} ends it: {shown(reply.first.text)} (alone: {shown(until)})"

    def without_bad(reply: Reply) -> str:
        if re.search(rf"\b{bad}\b", reply.first.text):
            raise Wrong(f"{bad!r} is in {shown(reply.first.text)}")
        return f"without {bad!r}: {shown(reply.first.text)}"

    def long_enough(reply: Reply) -> str:
        if not 60 <= reply.completion_tokens <= 80:
            raise Wrong(f"{reply.completion_tokens} tokens; asked: 60 to 80")
        return f"{reply.completion_tokens} tokens"

    return [
        Case("stop string", CHAT, chat(temperature=0, stop=[stop]), stopped),
        Case(
            "bad_words",
            CHAT,
            chat(temperature=0, ignore_eos=True, bad_words=[bad, " " + bad]),
            without_bad,
        ),
        Case(
            "min_tokens 60 of 80",
            CHAT,
            {**chat(temperature=1, min_tokens=60), "max_tokens": 80},
            long_enough,
        ),
    ]


# Log-probabilities


def logprob_cases() -> list[Case]:
    text = "The mill stands by the river, and the river turns its wheel."

    def scored(reply: Reply) -> str:
        if reply.first.text != text or reply.completion_tokens:
            raise Wrong(f"{shown(reply.first.text)}, {reply.completion_tokens} new tokens")
        values = [token.logprob for token in reply.first.tokens]
        if len(values) < 10 or max(values) > _SLACK:
            raise Wrong(
                f"{len(values)} log-probabilities, the largest {max(values, default=0):.3f}"
            )
        return f"mean log-probability {sum(values) / len(values):.4f} of {len(values)} tokens"

    def echoed(reply: Reply) -> str:
        if not reply.first.text.startswith(text) or reply.completion_tokens != TOKENS:
            raise Wrong(f"{shown(reply.first.text)}, {reply.completion_tokens} new tokens")
        return f"{len(reply.first.tokens)} tokens scored"

    def listed(reply: Reply) -> str:
        for token in reply.first.tokens:
            if said := check_list(token.top, 5) or is_likeliest(
                token.text, token.logprob, token.top
            ):
                raise Wrong(f"{token.text!r}: {said}")
        return f"{len(reply.first.tokens)} tokens with 5 alternatives each"

    more = {"prompt": text, "temperature": 0, "logprobs": 5}
    return [
        Case("echo, max_tokens 0", COMPLETIONS, {**more, "max_tokens": 0, "echo": True}, scored),
        Case(
            "echo and logprobs",
            COMPLETIONS,
            {**more, "max_tokens": TOKENS, "echo": True, "ignore_eos": True},
            echoed,
        ),
        Case("top_logprobs 5", CHAT, chat(temperature=0, logprobs=True, top_logprobs=5), listed),
    ]


# Grammars


SCHEMA: Body = {
    "type": "object",
    "properties": {
        "river": {"type": "string", "maxLength": 12},
        "km": {"type": "integer"},
        "kind": {"enum": ["wide", "narrow"]},
        "mills": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["river", "km", "kind", "mills"],
    "additionalProperties": False,
}


def grammar_cases() -> list[Case]:
    def fits(reply: Reply) -> str:
        if reply.first.finish_reason == "length":
            return "cut by its length"
        found = json.loads(reply.first.text)
        is_right = (
            set(found) == set(SCHEMA["required"])
            and isinstance(found["river"], str)
            and len(found["river"]) <= 12
            and type(found["km"]) is int
            and found["kind"] in ("wide", "narrow")
            and len(found["mills"]) <= 3
            and all(isinstance(mill, bool) for mill in found["mills"])
        )
        if not is_right:
            raise Wrong(f"{reply.first.text} does not fit its schema")
        return shown(reply.first.text)

    def is_json(reply: Reply) -> str:
        if reply.first.finish_reason == "stop":
            json.loads(reply.first.text)
        return shown(reply.first.text)

    def matches(pattern: str) -> Look:
        def look(reply: Reply) -> str:
            if not re.fullmatch(pattern, reply.first.text):
                raise Wrong(f"{shown(reply.first.text)} does not match {pattern}")
            return shown(reply.first.text)

        return look

    def case(name: str, look: Look, **how: Any) -> Case:
        body = {**chat(temperature=1, top_p=1, **how), "max_tokens": 128}
        return Case(name, CHAT, body, look, is_settled="seed" in how)

    schema = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA}}
    lark = 'start: "the " /[a-z]{3,8}/ " has " /[1-9][0-9]?/ " mills"'
    return [
        case("JSON schema", fits, response_format=schema),
        case("JSON schema, seed", fits, response_format=schema, seed=21),
        case("JSON schema, top_k and penalty", fits, guided_json=SCHEMA, top_k=50,
             repetition_penalty=1.1),
        case("JSON object", is_json, response_format={"type": "json_object"}),
        case("regex", matches(r"[A-Z][a-z]{2,9}, \d{2,4} km"),
             guided_regex=r"[A-Z][a-z]{2,9}, \d{2,4} km"),
        case("choice", matches("Rhine|Loire|Volga"), guided_choice=["Rhine", "Loire", "Volga"]),
        case("grammar", matches("the [a-z]{3,8} has [1-9][0-9]? mills"), guided_grammar=lark),
    ]  # fmt: skip
