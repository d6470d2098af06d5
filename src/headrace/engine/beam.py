"""Beam search: several sequences of one request, compared and re-chosen after every step.

Hypotheses end at an end token, scored logprob / length ** length_penalty; the search ends when no
running beam can beat the worst of the kept hypotheses, or at max_tokens. Beams share blocks; the
scheduler copies a block when two beams would write to it. Knows logprobs and token ids only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.request import BeamParams, FinishReason, SampledToken
from headrace.core.step import TopLogprobs
from headrace.engine.sequence import Sequence


class Forks(Protocol):
    """The part of the roster that a beam group uses."""

    def fork(self, parent: Sequence, computed_tokens: int) -> Sequence: ...

    def drop(self, sequence: Sequence) -> None: ...

    def resume(self, sequence: Sequence) -> None: ...


@dataclass(slots=True)
class Beam:
    sequence: Sequence
    tokens: list[tuple[int, float]] = field(default_factory=list)  # (id, logprob) of the output
    total: float = 0.0
    top: TopLogprobs | None = None  # of the step that all beams are waiting for


@dataclass(slots=True)
class Hypothesis:
    score: float
    tokens: list[tuple[int, float]]
    reason: FinishReason


class BeamGroup:
    def __init__(self, params: BeamParams) -> None:
        self.width = params.beam_width
        self._params = params
        self._beams: list[Beam] = []
        self._ended: list[Hypothesis] = []  # the best `width` so far

    def start(self, sequence: Sequence) -> None:
        self._beams = [Beam(sequence)]

    def receive(self, sequence: Sequence, top: TopLogprobs, roster: Forks) -> list[SampledToken]:
        """Take the candidates for a beam's next token. When all beams have theirs, choose the next
        beams; at the end of the search, return the result."""
        for beam in self._beams:
            if beam.sequence is sequence:
                beam.top = top
        if any(beam.top is None for beam in self._beams):
            return []
        self._advance(roster)
        return [] if self._beams else self._result(sequence)

    def _advance(self, roster: Forks) -> None:
        candidates = sorted(
            (
                (beam.total + logprob, number, token, logprob)
                for number, beam in enumerate(self._beams)
                for token, logprob in beam.top or []
            ),
            key=lambda c: (-c[0], c[1], c[2]),
        )
        length = len(self._beams[0].tokens) + 1
        chosen: list[tuple[Beam, int, float]] = []
        for rank, (total, number, token, logprob) in enumerate(candidates[: 2 * self.width]):
            beam = self._beams[number]
            if token in beam.sequence.stop_ids:
                # An end only counts if the candidate would be among the next beams.
                if rank < self.width:
                    self._end([*beam.tokens, (token, logprob)], total, FinishReason.STOP)
            elif len(chosen) < self.width:
                chosen.append((beam, token, logprob))
        if length >= self._beams[0].sequence.max_tokens:
            for beam, token, logprob in chosen:
                tokens = [*beam.tokens, (token, logprob)]
                self._end(tokens, beam.total + logprob, FinishReason.LENGTH)
            chosen = []
        elif self._is_decided(chosen, length):
            chosen = []
        self._move_to(chosen, roster)

    def _is_decided(self, chosen: list[tuple[Beam, int, float]], length: int) -> bool:
        if not chosen:
            return True
        if len(self._ended) < self.width:
            return False
        best = max(beam.total + logprob for beam, _, logprob in chosen)
        worst = min(h.score for h in self._ended)
        return bool(worst >= best / length**self._params.length_penalty)

    def _move_to(self, chosen: list[tuple[Beam, int, float]], roster: Forks) -> None:
        """The next beams: the first to continue a sequence keeps it, others fork it."""
        following: list[Beam] = []
        kept: set[int] = set()
        for beam, token, logprob in chosen:
            parent = beam.sequence
            first = parent.sequence_id not in kept
            kept.add(parent.sequence_id)
            sequence = parent if first else roster.fork(parent, parent.computed_tokens)
            tokens = [*beam.tokens, (token, logprob)]
            following.append(Beam(sequence, tokens, beam.total + logprob))
        for beam in self._beams:
            if beam.sequence.sequence_id not in kept:
                roster.drop(beam.sequence)
        for beam in following:  # only now: a fork copies its parent's tokens
            beam.sequence.token_ids.append(beam.tokens[-1][0])
            roster.resume(beam.sequence)
        self._beams = following

    def _end(self, tokens: list[tuple[int, float]], total: float, reason: FinishReason) -> None:
        score = total / len(tokens) ** self._params.length_penalty
        self._ended.append(Hypothesis(score, tokens, reason))
        self._ended.sort(key=lambda h: -h.score)
        del self._ended[self.width :]

    def _result(self, sequence: Sequence) -> list[SampledToken]:
        request_id = sequence.request.request_id
        return [
            SampledToken(
                request_id=request_id,
                token_id=token,
                logprob=logprob,
                index=index,
                finish_reason=found.reason if at == len(found.tokens) - 1 else None,
            )
            for index, found in enumerate(self._ended)
            for at, (token, logprob) in enumerate(found.tokens)
        ]
