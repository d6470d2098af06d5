"""A sequence: one continuation being computed. Its tokens, its blocks, what it draws, when it ends.

Knows token ids only: stop strings are handled where tokens become text. Changes no state by itself;
the scheduler does.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections.abc import Collection
from collections.abc import Sequence as Tokens
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from headrace.core.constraint import Allowed, Constraint, Foreseen
from headrace.core.request import FinishReason, GenerateRequest
from headrace.core.step import Drafts, DrawParams, FlatBias, RowExtra, RowResult, TopLogprobs

if TYPE_CHECKING:
    from headrace.engine.beam import BeamGroup

GREEDY = DrawParams(temperature=0.0)
NOTHING_FORESEEN = Foreseen()
RUN = 8  # positions whose random numbers come from one hash


class RequestDraws:
    """A request's parameters of draws in the form that steps use. Made once per request, however
    many continuations it has."""

    __slots__ = ("bad_words", "limits", "params", "stops")

    def __init__(self, request: GenerateRequest, stop_ids: frozenset[int]) -> None:
        self.params = GREEDY if request.beam is not None else _draw_params(request)
        # Tokens that are banned before min_tokens.
        self.stops = array("i", sorted(stop_ids) if request.params.min_tokens else ())
        # Bad words by their second-to-last token: (all tokens but the last, the last token).
        self.bad_words: dict[int | None, list[tuple[list[int], int]]] = {}
        for word in request.bad_token_ids:
            start = list(word[:-1])
            self.bad_words.setdefault(start[-1] if start else None, []).append((start, word[-1]))
        # Whether any token may be banned at any position.
        self.limits = request.beam is None and bool(
            request.params.min_tokens or request.bad_token_ids
        )

    def banned_after(self, token_ids: list[int], *, is_too_soon: bool) -> Collection[int]:
        """Tokens that may not come next: end tokens before min_tokens, last tokens of bad words."""
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
    """Fields that only few sequences have."""

    siblings: int = 0  # to be forked once the prompt is computed
    beams: BeamGroup | None = None
    constraint: Constraint | None = None  # has accepted exactly the generated tokens
    mask: bytes | None = None  # the constraint's, for the next token
    unstarted: tuple[Constraint, bytes] | None = None  # to fork siblings from; its first mask
    foreseen: Foreseen = NOTHING_FORESEEN  # what the constraint says may follow the last token
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

    With guesses in flight, `scheduled_tokens` counts them too, and nothing else is scheduled until
    it is known how many of them were right.
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
    # Whether the runner can apply penalties for a drawn token that is not known here yet.
    counts_previous: bool = False
    status: Status = Status.WAITING
    has_started: bool = False  # it or its parent was admitted before
    computed_tokens: int = 0
    scheduled_tokens: int = 0
    draws_in_flight: int = 0
    epoch: int = 0  # number of preemptions: results planned in an earlier epoch are lost
    blocks: list[int] = field(default_factory=list)
    table_version: int = 0  # of `blocks`, see core/step.py
    keys: list[bytes] = field(default_factory=list)  # prefix keys of full blocks, from the first on
    published_blocks: int = 0
    # Positions from `scheduled_tokens` up to this one are in blocks that no one else holds.
    own_tokens: int = 0
    prompt_tokens: int = 0
    top_logprobs: int = 0  # alternatives wanted with each drawn token
    # The next draw can't be planned before the last token is known here (see PREVIOUS).
    needs_last_token: bool = False
    brings_extra: bool = False  # with every draw
    full_tokens: int = 0  # of prompt and output together: with so many it ends
    guesses: list[int] = field(default_factory=list)  # in flight: what may follow `token_ids`
    _run_number: int = -1
    _run: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt_token_ids)
        self.full_tokens = self.prompt_tokens + self.max_tokens
        self.needs_last_token = self._depends_on_last_token()
        penalizes, beams = self.draws.params.penalizes, self.beams
        self.top_logprobs = (
            2 * beams.width if beams is not None else self.request.params.logprobs or 0
        )
        self.brings_extra = (
            penalizes or self.draws.limits or self.constraint is not None or self.top_logprobs > 0
        )

    def _depends_on_last_token(self) -> bool:
        return (
            self.beams is not None
            or self.constraint is not None
            or bool(self.draws.bad_words)
            or (self.draws.params.penalizes and not self.counts_previous)
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
    def forced(self) -> Tokens[int]:
        """The tokens that its constraint says come next, as far as it was asked."""
        return () if self.rare is None else self.rare.foreseen.token_ids

    @property
    def siblings(self) -> int:
        return 0 if self.rare is None else self.rare.siblings

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def wanted_tokens(self) -> int:
        """Tokens to schedule before the next draw, including one that is still being drawn."""
        known, drawing = len(self.token_ids), self.draws_in_flight
        if drawing and (self.needs_last_token or known + 1 >= self.full_tokens):
            return 0
        return known + drawing - self.scheduled_tokens

    @property
    def most_tokens(self) -> int:
        """The most tokens it may have in blocks. The last token is never computed."""
        return self.prompt_tokens + self.max_tokens - 1

    def hold_blocks(self, blocks: list[int]) -> None:
        """Set a new block table, in a new list: plans in flight keep the old one."""
        self.blocks = blocks
        self.table_version += 1

    def guess(self, token_ids: list[int]) -> None:
        """These are scheduled, as guesses of what follows its last token, which is too."""
        self.guesses = token_ids
        self.scheduled_tokens += len(token_ids)
        self.needs_last_token = True  # until they are judged

    def take_guesses(self) -> list[int]:
        """Its guesses; there are none from now on."""
        guesses, self.guesses = self.guesses, []
        self.needs_last_token = self._depends_on_last_token()
        return guesses

    def next_uniform(self) -> float:
        """The random number for the token that follows all known ones and those in flight. Not for
        greedy draws."""
        run, at = divmod(self.generated_tokens + self.draws_in_flight, RUN)
        if run != self._run_number:
            self._run_number, self._run = run, uniforms(self.seed, run)
        return self._run[at]

    def next_extra(self) -> RowExtra:
        """The extra of the row with that draw. Only if `brings_extra`."""
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

    def drafts_after(self, guesses: list[int], masks: Tokens[bytes]) -> Drafts:
        """The draws after each guess, with its constraint's masks if it has one. The draw before
        the first one is planned already."""
        draws, first = self.draws, self.generated_tokens + 1
        drafts = Drafts(uniforms=[0.0] * len(guesses), masks=masks)
        if draws.params.temperature:
            runs: list[float] = []
            for run in range(first // RUN, (first + len(guesses) - 1) // RUN + 1):
                runs += self._run if run == self._run_number else uniforms(self.seed, run)
            drafts.uniforms = runs[first % RUN : first % RUN + len(guesses)]
        if draws.limits:
            tokens, least = list(self.token_ids), self.request.params.min_tokens
            banned = []
            for place, guess in enumerate(guesses, start=first):
                tokens.append(guess)
                banned.append(draws.banned_after(tokens, is_too_soon=place < least))
            drafts.banned = banned
        return drafts

    def append(self, token_id: int, allowed: Allowed | None = None) -> FinishReason | None:
        """Append a drawn token. Returns the finish reason if the sequence ends with it. `allowed`
        is what the constraint allows after that token."""
        self.token_ids.append(token_id)
        if allowed is not None:
            if allowed.is_stopped:
                return FinishReason.STOP
            assert self.rare is not None
            self.rare.mask = allowed.mask
        return self.reason_to_end(token_id)

    def reason_to_end(self, last: int) -> FinishReason | None:
        """Why it ends with its last token, which is this one; None if it goes on."""
        if last in self.stop_ids and self.generated_tokens >= self.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.full_tokens else None

    def ask_scores(self, start: int, end: int, extra: RowExtra) -> None:
        """Ask for logprobs of the prompt's tokens from `start` to `end`, if they are wanted and not
        yet known."""
        top, rare = self.request.params.prompt_logprobs, self.rare
        if top is None or rare is None or len(rare.prompt_scores) >= self.prompt_tokens - 1:
            return
        targets = self.token_ids[start + 1 : end + 1]
        # The last token's successor is not known yet: use any target, its score is dropped.
        extra.targets = targets + [0] * (end - start - len(targets))
        extra.top_logprobs = max(extra.top_logprobs, top)

    def keep_scores(self, start: int, found: RowResult) -> None:
        """Keep the prompt tokens' logprobs, each position once even if it is computed again."""
        assert self.rare is not None
        scores, wanted = self.rare.prompt_scores, self.request.params.prompt_logprobs
        tops = found.target_tops or [[]] * len(found.target_logprobs)
        pairs = zip(found.target_logprobs, tops, strict=True)
        for at, (logprob, top) in enumerate(pairs, start=start):
            if at == len(scores) and at < self.prompt_tokens - 1:
                scores.append((logprob, top[:wanted]))

    def take_scores(self) -> list[tuple[float, TopLogprobs]] | None:
        """The prompt's logprobs. They come once per request: with the first token of its first
        continuation."""
        if self.rare is None or self.index != 0 or len(self.token_ids) != self.prompt_tokens + 1:
            return None
        return self.rare.prompt_scores or None


def _ends_with(token_ids: list[int], end: list[int]) -> bool:
    """Compares one slice. Only called if the token before it already matches."""
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
    asked = 1 if request.embed else asked  # an embedding needs blocks for its prompt only
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
    """The seed of a request's index-th continuation; the first one has the request's own seed."""
    if index == 0:
        return seed
    return int.from_bytes(_hash(seed, index, b"child")[:8], "little")


def uniforms(seed: int, run: int) -> tuple[float, ...]:
    """Numbers in [0, 1) for RUN positions: the same in every batch and on every machine."""
    words = struct.unpack(f"<{RUN}Q", _hash(seed, run, b"draw"))
    return tuple((word >> 11) / 2**53 for word in words)


def _hash(seed: int, number: int, person: bytes) -> bytes:
    data = (seed << 64 | number).to_bytes(16, "little")
    return hashlib.blake2b(data, digest_size=64, person=person).digest()
