"""From an Ask to a request that the engine takes: token ids that share what the asks share.

Every segment of a prompt is one number, repeated: what matters is which tokens are equal, and a
list of one number takes a pointer a token. A segment that was an answer of the model has the number
that the lean runner draws, so that a conversation's next turn finds it in the prefix cache.
"""

from __future__ import annotations

from functools import lru_cache

from headrace.core.errors import InvalidRequestError
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.simulate.lean import DRAWN
from headrace.workload.ask import Ask, answer_name, question_name


class Prompts:
    """One for all replicas of a fleet: a segment has the same number on each."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of named segments
        self._next = DRAWN + 1

    def request(self, ask: Ask, request_id: str) -> GenerateRequest:
        """Greedy, and exactly as long as the ask says."""
        own = ask.prompt_tokens - ask.shared_tokens
        if own < 0:
            raise InvalidRequestError(
                f"A request shares {ask.shared_tokens} tokens of a prompt of {ask.prompt_tokens}; "
                "expected no more than the prompt has.",
                "Make the prompt longer, or what it shares shorter.",
                param="shared",
            )
        token_ids: list[int] = []
        for name, tokens in ask.shared:
            token_ids += [self._number(name)] * tokens
        if ask.session is None:
            token_ids += [self._take()] * own
        else:  # the next turn's prompt begins with this one, and its answer
            token_ids += [self._number(question_name(ask.session, ask.turn))] * own
            self._numbers[answer_name(ask.session, ask.turn)] = DRAWN
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=_params(ask.output_tokens),
        )

    def _number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = self._take()
        return found

    def _take(self) -> int:
        self._next += 1
        return self._next - 1


@lru_cache(maxsize=4096)
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, seed=0)
