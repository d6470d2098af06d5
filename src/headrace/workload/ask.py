"""One request, as numbers: when it comes, how long it is, what it shares with others.

A prompt is segments one after the other. Those in `shared` have a name: two prompts whose first
segments have the same names and lengths begin with the same tokens. What follows them belongs to
this request alone. Knows no text, no token ids and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`at_s` is the scheduled time, from the start of the workload.

    Where `after_s` is set, the request follows another one of its session: it comes `after_s`
    seconds after the end of turn `turn - 1`, and never before `at_s`. A closed loop of N clients is
    N sessions whose turns follow each other at once.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    shared: tuple[tuple[str, int], ...] = ()  # (name, tokens) of each segment, from position 0 on
    session: int | None = None
    turn: int = 0
    after_s: float | None = None

    @property
    def shared_tokens(self) -> int:
        return sum(tokens for _, tokens in self.shared)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def answer_name(session: int, turn: int) -> str:
    """The name of the segment that is what the model answered in that turn."""
    return f"session {session} turn {turn} answer"


def question_name(session: int, turn: int) -> str:
    """The name of the segment that was new in that turn's prompt."""
    return f"session {session} turn {turn} question"
