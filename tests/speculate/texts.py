"""Sequences for tests of drafters: an object with what the seam shows of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.drafter import Method
from headrace.core.request import GenerateRequest, SamplingParams


@dataclass
class Text:
    """As core/speculation.py's Draftable."""

    sequence_id: int
    request: GenerateRequest
    token_ids: list[int]
    prompt_tokens: int
    forced: Sequence[int] = field(default_factory=tuple)


def text(
    sequence_id: int,
    tokens: list[int],
    *,
    answer: int = 0,
    salt: str = "",
    speculate: Method | None = None,
    seed: int | None = None,
) -> Text:
    """A sequence whose last `answer` tokens are the answer."""
    prompt = len(tokens) - answer
    request = GenerateRequest(
        request_id=str(sequence_id),
        prompt_token_ids=tokens[:prompt],
        params=SamplingParams(seed=seed),
        cache_salt=salt,
        speculate=speculate,
    )
    return Text(sequence_id, request, list(tokens), prompt)
