"""What speculation is measured with: conversations whose answers repeat much, some or nothing.

A workload is a list of conversations, one for each stream; a conversation is a list of turns. A
turn's prompt is made from the answers before it, so that they are in it. Nothing is random: stream
i of a workload is always the same. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.core.constraint import GrammarKind, GrammarSpec

# The text so far, with all answers: the next prompt.
Turn = Callable[[str], str]

_NAMES = ("price", "weight", "length", "volume", "charge", "speed", "height", "energy")
_VERBS = ("sum", "mean", "limit", "scale", "shift", "count", "check", "store")
_PLACES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Riga", "Sofia", "Tunis", "Vienna")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    turns: Sequence[Turn]
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    conversation: Callable[[int], Conversation]  # of a stream
    answer_tokens: int  # of each turn, at most
    is_repetitive: bool


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def _module(stream: int) -> str:
    name, verb = _NAMES[stream % 8], _VERBS[(stream // 8 + stream) % 8]
    functions = []
    for at, other in enumerate(_VERBS):
        functions.append(
            f"def {other}_{name}(items, factor={at + stream}):\n"
            f'    """The {other} of each {name}, times {at + stream}."""\n'
            f"    total = 0\n"
            f"    for item in items:\n"
            f"        if item.{name} is not None and item.{name} > {at}:\n"
            f"            total += item.{name} * factor\n"
            f"    return total\n"
        )
    return f"# {verb}_{name}.py\n\n" + "\n\n".join(functions)


def code_edit(stream: int) -> Conversation:
    """A file, and the same file with one name changed; its first line is given."""
    code = _module(stream)
    ask = (
        f"A file:\n\n```python\n{code}```\n\nThe same file, where `factor` is renamed to "
        f"`multiplier`:\n\n```python\n{code.partition('(')[0]}(items, multiplier={stream}):\n"
    )
    return Conversation(turns=[lambda before: ask])


def json_echo(stream: int) -> Conversation:
    """A document, and the same document again; its first line is given."""
    records = [
        {
            "id": 1000 * stream + at,
            "name": f"{_PLACES[at % 8]} {_NAMES[(at + stream) % 8]}",
            "tags": [_VERBS[(at + stream) % 8], _VERBS[(at * 3 + stream) % 8]],
            "active": (at + stream) % 3 == 0,
        }
        for at in range(12)
    ]
    text = json.dumps(records, indent=1)
    start = text.partition(",")[0]
    ask = f"The document:\n\n{text}\n\nThe document once more, unchanged:\n\n{start},"
    return Conversation(turns=[lambda before: ask])


_QUESTIONS = (
    "Why is the sky blue, and why is it red in the evening?",
    "Write a short letter to a landlord about a leaking tap.",
    "Explain how a binary search works, with an example.",
    "What should one see in {place} in two days?",
    "Give three arguments for and three against remote work.",
    "Tell a story about a lighthouse keeper in {place}.",
    "How do I make a simple tomato soup for four people?",
    "What is the difference between TCP and UDP?",
)


def chat(stream: int) -> Conversation:
    question = _QUESTIONS[stream % 8].format(place=_PLACES[(stream // 8 + stream) % 8])
    return Conversation(turns=[lambda before: _chat(question)])


_MORE = (
    "Say the same again, with one more example.",
    "Make it shorter, and keep the wording where you can.",
    "Now repeat your first answer and add a last sentence.",
)


def multi_turn(stream: int) -> Conversation:
    """A question, and three more that come back to the answers before."""
    question = _QUESTIONS[(stream + 3) % 8].format(place=_PLACES[stream % 8])
    turns: list[Turn] = [lambda before: _chat(question)]
    turns += [lambda before, more=more: f"{before}<|im_end|>\n{_chat(more)}" for more in _MORE]  # type: ignore[misc]
    return Conversation(turns=turns)


def forced_grammar(stream: int) -> Conversation:
    """A JSON object whose names, and some of whose values, are long and given by the schema."""
    fields = {
        f"measured_{name}_of_the_shipment_in_metric_units": {"type": "integer"} for name in _NAMES
    }
    fields["terms_and_conditions_of_carriage"] = {
        "const": "The carrier accepts the goods in apparent good order and condition, except as "
        "noted otherwise, for carriage from the place of receipt to the place of delivery."
    }
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    grammar = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    ask = _chat(f"Make up a shipment from {_PLACES[stream % 8]} as JSON.")
    return Conversation(turns=[lambda before: ask], grammar=grammar)


WORKLOADS = (
    Workload(name="code edit", conversation=code_edit, answer_tokens=400, is_repetitive=True),
    Workload(name="JSON echo", conversation=json_echo, answer_tokens=400, is_repetitive=True),
    Workload(name="chat", conversation=chat, answer_tokens=160, is_repetitive=False),
    Workload(name="multi-turn", conversation=multi_turn, answer_tokens=120, is_repetitive=False),
    Workload(name="grammar", conversation=forced_grammar, answer_tokens=400, is_repetitive=True),
)
