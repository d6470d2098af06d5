"""The seam between the engine and whoever guesses tokens: a `Speculator` proposes what a sequence
may draw next, and the engine has the guesses checked in the next step.

A guess never changes an answer: at each place the token is drawn as it would be without guesses,
and only guesses equal to what was drawn count. So a speculator may propose anything. It decides how
much, too: whether guesses pay is a question of time, which it learns from `stepped` and `taken`.
Knows no drafter and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.request import GenerateRequest
from headrace.core.step import StepPlan, StepResult


class Draftable(Protocol):
    """What a speculator sees of a sequence: the engine's own object, only to be read. All of its
    tokens are known."""

    @property
    def sequence_id(self) -> int: ...  # never reused; a request's n continuations have one each

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def token_ids(self) -> list[int]: ...  # prompt and answer; the same list throughout, only grows

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that its grammar says come next, if it has one that knows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRoom:
    """The step that guesses would join."""

    rows: int  # sequences that decode in it: one token each without guesses
    context_tokens: int  # that these attend to, all together
    most_tokens: int  # guesses that fit into it, all together; the engine cuts what is more


class Speculator(Protocol):
    """Used by the engine's thread alone. If a method raises, the engine logs it and goes on without
    a speculator."""

    def waits(self) -> bool:
        """Asked before a step while another is in flight: whether to wait for that one's tokens, so
        that guesses can follow them. If not, the step is planned without guesses. Never asked where
        one step is in flight at a time."""
        ...

    def propose(
        self, sequences: Sequence[Draftable], most: Sequence[int], room: DraftRoom
    ) -> Sequence[Sequence[int]]:
        """What each sequence may draw next, in order: ids of the model's vocabulary, or an empty
        list for no guess. Of more than `most` (1 or more, for each sequence) the rest is dropped,
        and so is what begins with a token that ends the sequence or that its grammar refuses."""
        ...

    def taken(self, sequence: Draftable, proposed: int, accepted: int) -> None:
        """Of `proposed` guesses that were checked, the first `accepted` were right. Called before
        they and the token drawn after them are appended to `token_ids`."""
        ...

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        """A step was computed, with guesses or without; `result.compute_s` is its time."""
        ...

    def ended(self, sequence: Draftable) -> None:
        """It will not be proposed for again. Also called for sequences that never were."""
        ...
