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
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from headrace.core.constraint import Allowed, Constraint
from headrace.core.request import FinishReason, GenerateRequest
from headrace.core.step import DrawParams, FlatBias, RowExtra, RowResult, TopLogprobs

if TYPE_CHECKING:
    from headrace.engine.beam import BeamGroup

GREEDY = DrawParams(temperature=0.0)
RUN = 8  # places that one hash has numbers for


class RequestDraws:
    """What a request says of its draws, in the form that steps take: made once, whatever its number
    of continuations and their length."""

    __slots__ = ("bad_words", "limits", "params", "stops")

    def __init__(self, request: GenerateRequest, stop_ids: frozenset[int]) -> None:
        self.params = GREEDY if request.beam is not None else _draw_params(request)
        # What may not come before min_tokens have.
        self.stops = array("i", sorted(stop_ids) if request.params.min_tokens else ())
        # By a word's last token but one: those whose end is near. The first tokens, and the last.
        self.bad_words: dict[int | None, list[tuple[list[int], int]]] = {}
        for word in request.bad_token_ids:
            start = list(word[:-1])
            self.bad_words.setdefault(start[-1] if start else None, []).append((start, word[-1]))
        # Whether some tokens may not be drawn at some places.
        self.limits = request.beam is None and bool(
            request.params.min_tokens or request.bad_token_ids
        )

    def banned_after(self, token_ids: list[int], *, is_too_soon: bool) -> Collection[int]:
        """Tokens that may not come next: an end too soon, the last token of a bad word."""
        stops: Collection[int] = self.stops if is_too_soon else ()
        if not self.bad_words:
            return stops
        near = self.bad_words.get(None, []) + self.bad_words.get(token_ids[-1], [])
        ends = {last for start, last in near if _ends_with(token_ids, start)}
        return ends.union(stops) if ends else stops


def _draw_params(request: GenerateRequest) -> DrawParams:
    params = request.params
    allowed = params.allowed_token_ids
    return DrawParams(
        **asdict(params.chosen),
        bias=FlatBias(params.logit_bias),
        allowed=None if allowed is None else array("i", allowed),
    )


@dataclass(slots=True, eq=False)
class Rare:
    """What few sequences have."""

    siblings: int = 0  # to be forked once the prompt is computed
    beams: BeamGroup | None = None
    constraint: Constraint | None = None  # has accepted exactly the generated tokens
    mask: bytes | None = None  # the constraint's, for the next token
    unstarted: tuple[Constraint, bytes] | None = None  # to fork siblings from; its first mask
    prompt_scores: list[tuple[float, TopLogprobs]] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)  # summed hidden states of computed tokens


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
    token_ids: list[int]  # only ever grows: plans in flight hold it
    seed: int
    draws: RequestDraws  # siblings share it
    rare: Rare | None = None
    # Whether the runner counts a token that was drawn but is not known yet, for penalties.
    counts_previous: bool = False
    status: Status = Status.WAITING
    has_started: bool = False  # it, or the one it was forked from, was admitted once
    computed_tokens: int = 0
    scheduled_tokens: int = 0
    draws_in_flight: int = 0
    epoch: int = 0  # of preemptions: what was in flight before one computed into blocks now lost
    blocks: list[int] = field(default_factory=list)
    table_version: int = 0  # of `blocks`, see core/step.py
    keys: list[bytes] = field(default_factory=list)  # prefix keys of full blocks, from the first on
    published_blocks: int = 0
    # Positions before this one, from `scheduled_tokens` on, lie in blocks that nobody else holds.
    own_tokens: int = 0
    prompt_tokens: int = 0
    top_logprobs: int = 0  # alternatives wanted with each drawn token
    # A draw can't be planned before the last token is known, not even by a runner that has it.
    needs_last_token: bool = False
    brings_extra: bool = False  # with every draw
    _most_tokens: int = 0  # of prompt and output together
    _run_number: int = -1
    _run: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt_token_ids)
        self._most_tokens = self.prompt_tokens + self.max_tokens
        penalizes = self.draws.params.penalizes
        self.needs_last_token = (
            self.beams is not None
            or self.constraint is not None
            or bool(self.draws.bad_words)
            or (penalizes and not self.counts_previous)
        )
        beams = self.beams
        self.top_logprobs = (
            2 * beams.width if beams is not None else self.request.params.logprobs or 0
        )
        self.brings_extra = (
            penalizes or self.draws.limits or self.constraint is not None or self.top_logprobs > 0
        )

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def beams(self) -> BeamGroup | None:
        return None if self.rare is None else self.rare.beams

    @property
    def constraint(self) -> Constraint | None:
        return None if self.rare is None else self.rare.constraint

    @property
    def siblings(self) -> int:
        return 0 if self.rare is None else self.rare.siblings

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

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

    def hold_blocks(self, blocks: list[int]) -> None:
        """Another table than before: plans in flight keep the list that they were made with."""
        self.blocks = blocks
        self.table_version += 1

    def next_uniform(self) -> float:
        """For the draw of the token that follows all known ones and those in flight, unless that is
        greedy."""
        run, at = divmod(self.generated_tokens + self.draws_in_flight, RUN)
        if run != self._run_number:
            self._run_number, self._run = run, uniforms(self.seed, run)
        return self._run[at]

    def next_extra(self) -> RowExtra:
        """What that draw needs besides, where it `brings_extra`."""
        extra = RowExtra(top_logprobs=self.top_logprobs)
        draws = self.draws
        if draws.params.penalizes:
            extra.history, extra.prompt_tokens = self.token_ids, self.prompt_tokens
        if draws.limits:
            place = self.generated_tokens + self.draws_in_flight
            is_too_soon = place < self.request.params.min_tokens
            extra.banned = draws.banned_after(self.token_ids, is_too_soon=is_too_soon)
        if self.rare is not None:
            extra.mask = self.rare.mask
        return extra

    def append(self, token_id: int, allowed: Allowed | None = None) -> FinishReason | None:
        """Take a drawn token; why the sequence ends with it, if it does. With a constraint, what it
        allows after that token comes along."""
        self.token_ids.append(token_id)
        if allowed is not None:
            if allowed.is_stopped:
                return FinishReason.STOP
            assert self.rare is not None
            self.rare.mask = allowed.mask
        if token_id in self.stop_ids and self.generated_tokens >= self.request.params.min_tokens:
            return FinishReason.STOP
        if len(self.token_ids) >= self._most_tokens:
            return FinishReason.LENGTH
        return None

    def ask_scores(self, start: int, end: int, extra: RowExtra) -> None:
        """Of the prompt's tokens from `start` to `end`, where they are wanted and not known."""
        top, rare = self.request.params.prompt_logprobs, self.rare
        if top is None or rare is None or len(rare.prompt_scores) >= self.prompt_tokens - 1:
            return
        targets = self.token_ids[start + 1 : end + 1]
        # The last token's successor is what is being drawn: any target will do, none is kept.
        extra.targets = targets + [0] * (end - start - len(targets))
        extra.top_logprobs = max(extra.top_logprobs, top)

    def keep_scores(self, start: int, found: RowResult) -> None:
        """Prompt tokens' logprobs, each position once, whatever was computed again."""
        assert self.rare is not None
        scores, wanted = self.rare.prompt_scores, self.request.params.prompt_logprobs
        tops = found.target_tops or [[]] * len(found.target_logprobs)
        pairs = zip(found.target_logprobs, tops, strict=True)
        for at, (logprob, top) in enumerate(pairs, start=start):
            if at == len(scores) and at < self.prompt_tokens - 1:
                scores.append((logprob, top[:wanted]))

    def take_scores(self) -> list[tuple[float, TopLogprobs]] | None:
        """The prompt's, which come once for a request: with the first token of the continuation
        that the others are forked from."""
        if self.rare is None or self.index != 0 or len(self.token_ids) != self.prompt_tokens + 1:
            return None
        return self.rare.prompt_scores or None


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
    siblings = (params.best_of or params.n) - 1 if beams is None else 0
    has_scores = params.prompt_logprobs is not None
    is_rare = beams or constraint or siblings or has_scores or request.embed
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
        draws=RequestDraws(request, stop_ids),
        rare=Rare(siblings, beams, constraint) if is_rare else None,
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
