"""A sequence: one continuation being computed. Its tokens, its blocks, what it draws, when it ends.

Knows token ids only: stop strings are the affair of whoever turns tokens into text. Moves nothing
by itself; the scheduler does.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from headrace.core.constraint import Allowed, Constraint
from headrace.core.request import FinishReason, GenerateRequest
from headrace.core.step import (
    PREVIOUS,
    Draw,
    EntryResult,
    FlatBias,
    StepEntry,
    TopLogprobs,
)

if TYPE_CHECKING:
    from headrace.engine.beam import BeamGroup

GREEDY = Draw(temperature=0.0)
RUN = 8  # places that one hash has numbers for
_UNKNOWN = [PREVIOUS]


class RequestIds:
    """What a request says of token ids, in the form that steps take: made once, whatever its number
    of continuations and their length."""

    __slots__ = ("allowed", "bad_words", "bias", "stops")

    def __init__(self, request: GenerateRequest, stop_ids: frozenset[int]) -> None:
        params = request.params
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else array("i", allowed)
        self.bias = FlatBias(params.logit_bias)
        # What may not come before min_tokens have.
        self.stops = array("i", sorted(stop_ids) if params.min_tokens else ())
        # By a word's last token but one: those whose end is near. The first tokens, and the last.
        self.bad_words: dict[int | None, list[tuple[list[int], int]]] = {}
        for word in request.bad_token_ids:
            start = list(word[:-1])
            self.bad_words.setdefault(start[-1] if start else None, []).append((start, word[-1]))

    def banned_after(self, token_ids: list[int]) -> set[int]:
        """The last tokens of bad words that have come but for those."""
        near = self.bad_words.get(None, []) + self.bad_words.get(token_ids[-1], [])
        return {last for start, last in near if _ends_with(token_ids, start)}


class Status(Enum):
    WAITING = auto()  # to be admitted; has no blocks, or those it was forked with
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """
    token_ids   [ prompt ................ | generated ...... ][ drawn, not yet known ]
                [ computed ........ | in flight ]
                [ scheduled ................... | to schedule                        ]
    """

    sequence_id: int
    request: GenerateRequest
    index: int  # which of the request's continuations
    order: int  # of arrival; siblings share it
    arrival_s: float
    max_tokens: int  # of output: what was asked for, within context and pool
    stop_ids: frozenset[int]
    token_ids: list[int]
    seed: int
    status: Status = Status.WAITING
    has_started: bool = False  # it, or the one it was forked from, was admitted once
    computed_tokens: int = 0
    scheduled_tokens: int = 0
    draws_in_flight: int = 0
    epoch: int = 0  # of preemptions: what was in flight before one computed into blocks now lost
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # prefix keys of full blocks, from the first on
    published_blocks: int = 0
    prompt_scores: list[tuple[float, TopLogprobs]] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)  # summed hidden states of computed tokens
    siblings: int = 0  # to be forked once the prompt is computed
    beams: BeamGroup | None = None
    constraint: Constraint | None = None  # has accepted exactly the generated tokens
    mask: bytes | None = None  # the constraint's, for the next token
    unstarted: tuple[Constraint, bytes] | None = None  # to fork siblings from; its first mask
    ids: RequestIds | None = None  # its parent's, where it was forked
    prompt_tokens: int = 0
    # Positions before this one, from `scheduled_tokens` on, lie in blocks that nobody else holds.
    own_tokens: int = 0
    top_logprobs: int = 0  # alternatives wanted with each drawn token
    # Whether the runner counts a token that was drawn but is not known yet, for penalties.
    counts_previous: bool = False
    # A draw can't be planned before the last token is known, not even by a runner that has it.
    needs_last_token: bool = False
    # Neither beams nor a grammar: a drawn token is taken as it comes.
    takes_tokens: bool = True
    _most_tokens: int = 0  # of prompt and output together
    _constant_draw: Draw | None = None
    _draws: tuple[Draw, ...] = ()  # two, as two plans may be in flight
    _may_ban: bool = False
    _entries: tuple[StepEntry, ...] = ()  # likewise
    _run_number: int = -1
    _run: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        params = self.request.params
        if self.ids is None:
            self.ids = RequestIds(self.request, self.stop_ids)
        self.prompt_tokens = len(self.request.prompt_token_ids)
        self._most_tokens = self.prompt_tokens + self.max_tokens
        self.takes_tokens = self.beams is None and self.constraint is None
        self.needs_last_token = (
            self.beams is not None
            or self.constraint is not None
            or bool(self.request.bad_token_ids)
            or (self._penalizes() and not self.counts_previous)
        )
        self.top_logprobs = params.logprobs or 0 if self.beams is None else 2 * self.beams.width
        self._may_ban = params.min_tokens > 0 or bool(self.request.bad_token_ids)
        if self.beams is not None or self._is_greedy():
            self._constant_draw = GREEDY
        else:
            self._draws = (self._new_draw(), self._new_draw())

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def tells_scores(self) -> bool:
        """Whether the prompt's come with the token that is its last: once for a request, with the
        first token of the continuation that the others are forked from."""
        return self.index == 0 and len(self.token_ids) == self.prompt_tokens + 1

    @property
    def wanted_tokens(self) -> int:
        """To be scheduled before the next draw, one that is only being drawn now included."""
        known, drawing = len(self.token_ids), self.draws_in_flight
        if drawing and (self.needs_last_token or known + 1 >= self._most_tokens):
            return 0
        return known + drawing - self.scheduled_tokens

    @property
    def most_tokens(self) -> int:
        """The longest this sequence can become in blocks. The last token is never computed."""
        return self.prompt_tokens + self.max_tokens - 1

    def next_entry(self, start: int) -> StepEntry:
        """Of the one token at `start`, with a draw after it. Made once and used every second time:
        this runs for every token, and the plan before the last one has been committed by now."""
        if not self._entries:
            self._entries = (self._empty_entry(), self._empty_entry())
        entry = self._entries[start % 2]
        entry.token_ids = [self.token_ids[start]] if start < len(self.token_ids) else _UNKNOWN
        entry.start = start
        entry.block_table = self.blocks
        entry.draw = self._constant_draw or self.next_draw()
        return entry

    def _empty_entry(self) -> StepEntry:
        return StepEntry(
            sequence_id=self.sequence_id,
            token_ids=[],
            start=0,
            block_table=[],
            top_logprobs=self.top_logprobs,
        )

    def next_draw(self) -> Draw:
        """For the token that follows all known ones and those in flight."""
        if self._constant_draw is not None:
            return self._constant_draw
        place = len(self.token_ids) - self.prompt_tokens + self.draws_in_flight
        draw = self._draws[place % 2]  # used again: this runs for every token of every sequence
        if draw.temperature:
            draw.uniform = self._uniform(place)
        draw.history = self.token_ids
        draw.mask = self.mask
        if self._may_ban:
            draw.banned = self._banned(place)
        return draw

    def append(self, token_id: int, allowed: Allowed | None = None) -> FinishReason | None:
        """Take a drawn token; why the sequence ends with it, if it does. With a constraint, what it
        allows after that token comes along."""
        self.token_ids.append(token_id)
        if allowed is not None:
            if allowed.is_stopped:
                return FinishReason.STOP
            self.mask = allowed.mask
        if token_id in self.stop_ids and self.generated_tokens >= self.request.params.min_tokens:
            return FinishReason.STOP
        if len(self.token_ids) >= self._most_tokens:
            return FinishReason.LENGTH
        return None

    def keep_scores(self, entry: StepEntry, found: EntryResult) -> None:
        """Prompt tokens' logprobs, each position once, whatever was computed again."""
        wanted = self.request.params.prompt_logprobs
        tops = found.target_top or [[]] * len(found.target_logprobs)
        scores = zip(found.target_logprobs, tops, strict=True)
        for at, (logprob, top) in enumerate(scores, start=entry.start):
            if at == len(self.prompt_scores) and at < self.prompt_tokens - 1:
                self.prompt_scores.append((logprob, top[:wanted]))

    def _new_draw(self) -> Draw:
        """With all that is the same at every place."""
        params, ids = self.request.params, self.ids
        assert ids is not None
        chosen = params.chosen
        return Draw(
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            min_p=params.min_p,
            typical_p=params.typical_p,
            repetition_penalty=chosen.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            prompt_tokens=self.prompt_tokens,
            bias=ids.bias,
            allowed=ids.allowed,
        )

    def _uniform(self, place: int) -> float:
        run, at = divmod(place, RUN)
        if run != self._run_number:
            self._run_number, self._run = run, uniforms(self.seed, run)
        return self._run[at]

    def _penalizes(self) -> bool:
        params = self.request.params
        return (
            params.chosen.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def _is_greedy(self) -> bool:
        """Whether every draw is of the likeliest token as the model gives it."""
        params = self.request.params
        return (
            params.temperature == 0
            and self.constraint is None
            and not self._may_ban
            and not self._penalizes()
            and not params.logit_bias
            and params.allowed_token_ids is None
        )

    def _banned(self, place: int) -> Collection[int]:
        """Tokens that may not come at this place: an end too soon, the last of a bad word."""
        ids = self.ids
        assert ids is not None
        too_soon = place < self.request.params.min_tokens
        ends = ids.banned_after(self.token_ids) if ids.bad_words else ()
        if not ends:
            return ids.stops if too_soon else ()
        return ends.union(ids.stops) if too_soon else ends


def _ends_with(token_ids: list[int], end: list[int]) -> bool:
    """One slice is compared, and only where its last token is known to be right."""
    return not end or token_ids[-len(end) :] == end


def start_sequence(
    sequence_id: int,
    request: GenerateRequest,
    *,
    index: int = 0,
    order: int,
    arrival_s: float,
    room_tokens: int,
    eos_ids: frozenset[int],
    seed: int | None = None,
    beams: BeamGroup | None = None,
    constraint: Constraint | None = None,
    counts_previous: bool = False,
) -> Sequence:
    """A request's continuation, with room for `room_tokens` of output."""
    params = request.params
    asked = params.max_tokens if request.beam is None else request.beam.max_tokens
    asked = 1 if request.embed else asked  # so that it counts as its prompt, nothing more
    ignore_eos = params.ignore_eos if request.beam is None else request.beam.ignore_eos
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignore_eos else eos_ids)
    return Sequence(
        sequence_id=sequence_id,
        request=request,
        index=index,
        order=order,
        arrival_s=arrival_s,
        max_tokens=room_tokens if asked is None else min(asked, room_tokens),
        stop_ids=stop_ids,
        token_ids=list(request.prompt_token_ids),
        seed=child_seed(choose_seed(request) if seed is None else seed, index),
        beams=beams,
        constraint=constraint,
        counts_previous=counts_previous,
    )


def choose_seed(request: GenerateRequest) -> int:
    seed = request.params.seed
    return secrets.randbits(64) if seed is None else seed


def child_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th continuation; the first one's is the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(_hash(seed, index, b"child")[:8], "little")


def uniforms(seed: int, run: int) -> tuple[float, ...]:
    """Numbers in [0, 1) for RUN places of a seed: the same in every batch, on every machine."""
    words = struct.unpack(f"<{RUN}Q", _hash(seed, run, b"draw"))
    return tuple((word >> 11) / 2**53 for word in words)


def _hash(seed: int, number: int, person: bytes) -> bytes:
    data = (seed << 64 | number).to_bytes(16, "little")
    return hashlib.blake2b(data, digest_size=64, person=person).digest()
