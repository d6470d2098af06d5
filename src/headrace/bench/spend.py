"""Money: what a run has cost so far, and whether one more request stays within the limit.

What is on its way counts with all that was asked for, so that the limit holds whatever comes back.
"""

from __future__ import annotations

import math

from headrace.bench.record import Record
from headrace.client.answer import Answer
from headrace.core.errors import ConfigError
from headrace.hardware.api_prices import ApiPrice
from headrace.workload.ask import Ask

# The three questions of target.py, with a template and words of several tokens.
_QUESTIONS, _QUESTION_TOKENS, _ANSWER_TOKENS = 3, 1500, 2


class Purse:
    """`limit_usd` for everything that is sent with it, over all runs; without it, only a sum."""

    def __init__(self, price: ApiPrice, limit_usd: float = math.inf) -> None:
        self._price = price
        self._limit_usd = limit_usd
        self.spent_usd = 0.0
        self._on_its_way_usd = 0.0

    def may_send(self, ask: Ask) -> bool:
        """Sets the money aside if there is enough."""
        needed = self._cost(ask.prompt_tokens, ask.output_tokens)
        if self.spent_usd + self._on_its_way_usd + needed > self._limit_usd:
            return False
        self._on_its_way_usd += needed
        return True

    def settle(self, record: Record) -> None:
        """A request that failed without usage is taken to have cost its prompt."""
        asked = record.ask
        self._on_its_way_usd -= self._cost(asked.prompt_tokens, asked.output_tokens)
        cached = record.answer.cached_tokens or 0
        tokens = record.tokens if record.answer.times_s else 0
        self.spent_usd += self._cost(record.prompt_tokens, tokens, cached)

    def check_questions(self) -> None:
        """Before anything is sent: what is asked to find one's way must fit too."""
        needed = self._cost(_QUESTION_TOKENS, _QUESTIONS * _ANSWER_TOKENS)
        if needed > self._limit_usd:
            raise ConfigError(
                f"--spend-limit is {self._limit_usd:g} dollars; the questions before a run alone "
                f"cost up to {needed:.2g}.",
                "Give more.",
            )

    def pay(self, answer: Answer) -> None:
        """For a question that was no part of a run."""
        self.spent_usd += self._cost(
            answer.prompt_tokens or 0, answer.output_tokens or 0, answer.cached_tokens or 0
        )

    def _cost(self, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        price = self._price
        cached_usd = price.cached_input_usd
        cached_usd = price.input_usd if cached_usd is None else cached_usd
        return (
            (prompt_tokens - cached_tokens) * price.input_usd
            + cached_tokens * cached_usd
            + output_tokens * price.output_usd
        ) / 1e6
