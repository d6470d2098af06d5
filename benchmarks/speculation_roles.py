"""An engine that can be told to guess or not, between two runs, and stays where it is in memory.

Without guesses it does what an engine with `--speculate off` does: its scheduler has nobody to ask.
Knows the inside of the engine that is measured, and nothing of what it computes.
"""

from __future__ import annotations

from headrace import LLM
from headrace.speculate.answer_pool import AnswerPool
from headrace.speculate.speculator import TimedSpeculator


class Player:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._scheduler = llm._engine.scheduler
        self._drafting = self._scheduler._drafting

    @property
    def speculator(self) -> TimedSpeculator | None:
        """None where nobody guesses, or somebody who does not learn times."""
        found = self.llm._assembled.speculator
        return found if isinstance(found, TimedSpeculator) else None

    def start(self, *, guesses: bool) -> None:
        """Before a run. What was learnt stays; past answers are forgotten."""
        assert not self._scheduler.has_work
        drafting = self._drafting if guesses else None
        self._scheduler._drafting = self._scheduler._taking._drafting = drafting
        self._scheduler._roster.on_drop = None if drafting is None else drafting.ended
        if self.speculator is not None:
            self.speculator._pool = AnswerPool()
