"""The one seam between deciding and computing: StepPlan in, StepResult out, through a Runner.

A plan is columns of plain numbers, one row for each sequence that takes part. There is no prefill
and no decode here: a row asks for some tokens of its sequence to be computed, and perhaps for the
token that follows them. Whoever writes plans does not know what computes them; whoever computes
does not know why.

What both sides rely on:

- Nobody changes a plan that was submitted, but for two values of a row that are shared with its
  author, because to copy them would cost every step as much as the sequence is long: its block
  table and its history. A runner reads these when the plan is submitted.
- A history only ever grows. A block table only grows as long as its version is the same: whoever
  changes an entry of it makes a new list, with another version. So a runner, or whoever sends plans
  to another process, need look only at the end that it has not seen yet of a (sequence, version)
  that it has seen before. Neither ids of sequences nor their versions are used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from headrace.core.sampling import NEUTRAL, DrawNumbers, filters_of, penalties_of

# In place of a token id: the token that this sequence drew in the step before, which whoever wrote
# the plan did not know yet. Only as a row's single token, and only where `steps_in_flight` > 1.
PREVIOUS = -1


class FlatBias(dict[int, float]):
    """A bias whose ids and values lie in arrays too, made once: a backend takes those in every step
    of every continuation, and going through a mapping would cost as much as the mapping is long."""

    __slots__ = ("flat_ids", "flat_values")

    def __init__(self, bias: Mapping[int, float]) -> None:
        super().__init__(bias)
        self.flat_ids = array("i", bias)
        self.flat_values = array("f", bias.values())


_NO_BIAS = FlatBias({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawParams(DrawNumbers):
    """How a sequence draws its tokens: what is the same at every place. Made once a request, and
    compared by identity. The numbers are the rows of core/sampling.py; what they mean, and in which
    order, is in backends/reference/sampling.py."""

    bias: FlatBias = field(default_factory=lambda: _NO_BIAS)  # added to the logits
    allowed: Collection[int] | None = None  # all other tokens are dropped
    # The numbers as backends take them, in the table's order.
    filters: tuple[float, ...] = field(init=False)
    penalties: tuple[float, ...] = field(init=False)
    # Whether the tokens so far make a difference: then a row brings its history.
    penalizes: bool = field(init=False)
    # Whether a token is drawn from other logits than the model's, whatever the row says besides.
    adjusts: bool = field(init=False)
    # Whether it is more than the model's likeliest token.
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__  # frozen
        put(self, "filters", tuple(map(float, filters_of(self))))
        put(self, "penalties", penalties_of(self))
        put(self, "penalizes", self.penalties != penalties_of(NEUTRAL))
        put(self, "adjusts", self.penalizes or bool(self.bias) or self.allowed is not None)
        put(self, "samples", self.adjusts or self.temperature != 0)


@dataclass(slots=True, kw_only=True)
class RowExtra:
    """What few rows of a plan have: limits on a draw that change from place to place, what its
    penalties are about, and other results than a token."""

    banned: Collection[int] = ()  # tokens that may not be drawn
    # A bit a token: t may be drawn if mask[t >> 3] >> (t & 7) & 1. Tokens past its end may not be;
    # bits past the vocabulary mean nothing.
    mask: bytes | None = None
    # If the draw penalizes: the sequence's tokens up to the row's last, of which so many are the
    # prompt's. One that is PREVIOUS is not in it, and counts all the same: as output.
    history: Sequence[int] = ()
    prompt_tokens: int = 0
    targets: list[int] | None = None  # score: one id a token, its logprob as the token's successor
    top_logprobs: int = 0  # how many of the likeliest to give with the drawn token and each target
    pool: bool = False  # give the sum of its tokens' hidden states

    @property
    def adjusts(self) -> bool:
        """Whether a draw is from other logits than the model's because of what is said here."""
        return self.mask is not None or len(self.banned) > 0


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """Everything one step computes. Row i is one sequence's share:

    positions   0 ........ starts[i] ............ starts[i] + counts[i]
                [ in blocks ][ computed now       ]

    `token_ids` holds the rows' tokens one after the other; every other column has a value a row.
    """

    sequence_ids: list[int] = field(default_factory=list)  # each once
    counts: list[int] = field(default_factory=list)  # of tokens to be computed now, 1 or more
    starts: list[int] = field(default_factory=list)  # position of the first of them
    token_ids: list[int] = field(default_factory=list)
    # Block numbers from position 0 on, covering the last token that is computed now.
    tables: list[list[int]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the tables
    draws: list[DrawParams | None] = field(default_factory=list)  # of the token after the last one
    # In [0, 1), where there is a draw: its only randomness. The same number gives the same token on
    # every runner and in every batch.
    uniforms: list[float] = field(default_factory=list)
    extras: dict[int, RowExtra] = field(default_factory=dict)  # by row; most plans have none
    # (from, to): blocks to be copied whole before anything is computed
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        """Rows."""
        return len(self.sequence_ids)

    @property
    def batch_tokens(self) -> int:
        return len(self.token_ids)

    def add(
        self,
        sequence_id: int,
        token_ids: list[int],
        start: int,
        table: list[int],
        version: int = 0,
        draw: DrawParams | None = None,
        uniform: float = 0.0,
        extra: RowExtra | None = None,
    ) -> None:
        """The next row."""
        if extra is not None:
            self.extras[len(self.sequence_ids)] = extra
        self.sequence_ids.append(sequence_id)
        self.counts.append(len(token_ids))
        self.starts.append(start)
        self.token_ids += token_ids
        self.tables.append(table)
        self.versions.append(version)
        self.draws.append(draw)
        self.uniforms.append(uniform)

    def remove(self, row: int) -> None:
        """Take a row out again; those behind it move up."""
        first = sum(self.counts[:row])
        del self.token_ids[first : first + self.counts[row]]
        for column in (
            self.sequence_ids,
            self.counts,
            self.starts,
            self.tables,
            self.versions,
            self.draws,
            self.uniforms,
        ):
            del column[row]
        self.extras.pop(row, None)
        self.extras = {at - (at > row): extra for at, extra in self.extras.items()}


TopLogprobs = Sequence[tuple[int, float]]  # (token id, logprob), likeliest first


@dataclass(slots=True, kw_only=True)
class RowResult:
    """What a step found for one row besides tokens, or why it found none."""

    tops: Sequence[TopLogprobs] = ()  # for each drawn token
    target_logprobs: Sequence[float] = ()
    target_tops: Sequence[TopLogprobs] = ()
    # The sum over the row's tokens of the last hidden states, after the final norm, if asked for;
    # added up in double precision.
    pooled: list[float] | None = None
    error: str | None = None  # this sequence failed, alone
    is_own_fault: bool = False  # because of what its draw asked for


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step found, in columns: one value for each row of its plan, in the same order.

    Logprobs are of the distribution as the model gave it: no temperature, no penalties, no filters.
    """

    tokens: list[list[int]]  # drawn; none where nothing was to be drawn, or the row failed
    logprobs: list[list[float]]  # theirs
    extras: dict[int, RowResult] = field(default_factory=dict)  # by row; most results have none
    compute_s: float = 0.0  # the whole step
    sample_s: float = 0.0  # of it, drawing and scoring tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What a plan may not exceed."""

    max_batch_tokens: int
    max_sequences: int
    total_blocks: int
    block_tokens: int
    context_tokens: int
    steps_in_flight: int = 1  # plans that may be submitted and not yet collected
    # Whether a draw with penalties may follow PREVIOUS. Otherwise it waits for that token.
    counts_previous: bool = False


class Runner(Protocol):
    """Computes plans in order. `submit` may return before the work is done."""

    @property
    def limits(self) -> RunnerLimits: ...

    @property
    def progress(self) -> int:
        """Moves as long as work is being done, within a step too: one that stands still while a
        step is under way is stuck. Any thread may read it."""
        ...

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """The result of the oldest plan submitted and not yet collected."""
        ...

    def close(self) -> None:
        """Let go of threads and memory; nothing may be submitted afterwards."""
        ...


@runtime_checkable
class Threaded(Protocol):
    """What a runner that computes with threads can say of them besides."""

    @property
    def threads(self) -> int: ...

    def take_mean_threads(self) -> float:
        """How many of them computed together since the last time. Not while a step is in
        flight."""
        ...
