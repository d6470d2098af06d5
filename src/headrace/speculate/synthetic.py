"""Drafts of which a set share is right, for load tests: what speculation would do at that rate.

Right tokens have to come from somewhere. Here they come from an earlier answer to the same request:
a load test sends its requests twice, and the first round is computed without guesses. So answers
are right, as with any drafter; where an answer differs from the earlier one (a sampled one without
a seed) guesses are wrong from there on. Keeps every answer it sees, up to a bound; not for service.
"""

from __future__ import annotations

from collections import OrderedDict
from random import Random
from typing import Protocol

from headrace.core.request import GenerateRequest
from headrace.core.speculation import Draftable
from headrace.speculate.draft import Draft, model_kind

KEPT_TOKENS = 1 << 20

_Key = tuple[str, int | None, tuple[int, ...]]


class Synthetic(Protocol):
    """Drafts for load tests and simulations, where it is known what is right."""

    def draft(self, sequence: Draftable, most: int) -> Draft: ...

    def keep(self, sequence: Draftable) -> None:
        """An answer has ended."""
        ...


class SyntheticDrafter:
    def __init__(self, rate: float, *, seed: int = 0, kept_tokens: int = KEPT_TOKENS) -> None:
        self.rate = rate
        self._random = Random(seed)
        self._answers: OrderedDict[_Key, list[int]] = OrderedDict()
        self._keys: dict[int, _Key] = {}  # of sequences that have not ended
        self._kept, self._most = 0, kept_tokens

    def draft(self, sequence: Draftable, most: int) -> Draft:
        """The next tokens of the earlier answer; each is made wrong with the chance 1 - rate."""
        answer = self._answers.get(self._key_of(sequence), [])
        given = len(sequence.token_ids) - sequence.prompt_tokens
        if given < 1 or answer[given - 1 : given] != sequence.token_ids[-1:]:
            return Draft()
        tokens = [self._perhaps_wrong(token) for token in answer[given : given + most]]
        return Draft(tokens, [model_kind(at) for at in range(len(tokens))])

    def keep(self, sequence: Draftable) -> None:
        """An answer has ended."""
        key, answer = self._key_of(sequence), sequence.token_ids[sequence.prompt_tokens :]
        del self._keys[sequence.sequence_id]
        self._kept += len(answer) - len(self._answers.pop(key, []))
        self._answers[key] = answer
        while self._kept > self._most:
            self._kept -= len(self._answers.popitem(last=False)[1])

    def _key_of(self, sequence: Draftable) -> _Key:
        """Made once: a prompt is long, and drafts are asked for in every step."""
        key = self._keys.get(sequence.sequence_id)
        if key is None:
            key = self._keys[sequence.sequence_id] = _key(sequence.request)
        return key

    def _perhaps_wrong(self, token: int) -> int:
        if self._random.random() < self.rate:
            return token
        return token - 1 if token else 1


def _key(request: GenerateRequest) -> _Key:
    return request.cache_salt, request.params.seed, tuple(request.prompt_token_ids)
