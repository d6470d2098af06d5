"""Token ids for a prompt that is only numbers: equal segments get equal ids, others different ones.

For engines that are asked with ids (the simulator; a server's completions endpoint). Answers of
earlier turns are what the model really said, if the caller kept it. Knows no tokenizer: the ids are
drawn from those that the caller allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from headrace.workload.ask import Ask


def segment_ids(name: str, tokens: int, vocabulary: Sequence[int]) -> list[int]:
    """The same name gives the same ids, and a longer segment begins with a shorter one's."""
    return Random(name).choices(vocabulary, k=tokens)


def prompt_ids(
    ask: Ask, own_name: str, vocabulary: Sequence[int], answers: Mapping[str, Sequence[int]]
) -> list[int]:
    """`own_name` names what no other prompt has: in a session ask.question_name, so that the next
    turn finds it again. `answers` are by ask.answer_name; one that is not there is drawn."""
    ids: list[int] = []
    for name, tokens in ask.shared:
        said = answers.get(name, ())
        # An answer that ended early: the rest is drawn, so that the prompt has its length.
        ids += said[:tokens]
        if len(said) < tokens:
            ids += segment_ids(name, tokens - len(said), vocabulary)
    return ids + segment_ids(own_name, ask.prompt_tokens - len(ids), vocabulary)
