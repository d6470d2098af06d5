"""The beginnings of a simulated prompt, as a router would hash them: equal where the tokens are.

Knows asks and lengths; policies/ decides what they are good for.
"""

from __future__ import annotations

from functools import lru_cache

from headrace.policies.prefixes import Prefixes, lengths
from headrace.policies.routing import key_of
from headrace.workload.ask import Ask, question_name


def prefixes_of(ask: Ask, most_tokens: int) -> Prefixes:
    """Up to `most_tokens` of the prompt. What no other prompt can share has none."""
    segments = ask.shared
    if ask.session is not None:  # the next turn begins with this one
        own = ask.prompt_tokens - ask.shared_tokens
        segments = (*segments, (question_name(ask.session, ask.turn), own))
    return _prefixes(segments, most_tokens)


@lru_cache(maxsize=1 << 16)
def _prefixes(segments: tuple[tuple[str, int], ...], most_tokens: int) -> Prefixes:
    found: list[tuple[int, int]] = []
    begin, before = 0, 0  # of a segment, and a hash of those before it
    whole = min(most_tokens, sum(tokens for _, tokens in segments))
    segment = iter(segments)
    name, size = next(segment, ("", 0))
    for length in lengths(whole):
        while length > begin + size:
            begin, before = begin + size, key_of(before, name, size)
            name, size = next(segment)
        found.append((key_of(before, name, length - begin), length))
    return tuple(found)
