"""The one seam between deciding and computing: StepPlan in, StepResult out, through a Runner.

A plan is columns of plain numbers, one row for each sequence that takes part. There is no prefill
and no decode here: a row asks for some tokens of its sequence to be computed, and perhaps for the
token that follows them. The author of a plan (the scheduler) does not know what computes it; the
runner does not know why it was planned.

What both sides rely on:

- A submitted plan does not change, except for two values of a row: its block table and its history.
  These lists are shared with the plan's author, because copying them in every step would cost time
  in proportion to the sequence's length. A runner reads them when the plan is submitted.
- A row may end in drafts: tokens that somebody guessed. It then draws a token after its last known
  token and one after each draft, each as if the tokens before it were all known. The runner does
  not judge whether a draft was right; the author does, and what was computed for wrong ones is
  overwritten by a later plan: until then nothing reads these positions.
- A history only grows. A block table only grows as long as its version is the same; to change an
  entry, the author makes a new list with a new version. So a runner (or code that sends plans to
  another process) that has seen a (sequence, version) before only has to read the new entries at
  the end. Sequence ids and versions are never reused.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from headrace.core.sampling import NEUTRAL, DrawNumbers, filters_of, penalties_of

# Stands for the token that this sequence drew in the previous step, which was not yet known when
# the plan was written. Only as a row's single token, and only if `steps_in_flight` > 1.
PREVIOUS = -1


class FlatBias(dict[int, float]):
    """A bias that also has its ids and values as arrays, made once. Backends use the arrays in
    every step of every continuation; iterating over a mapping there would be slow."""

    __slots__ = ("flat_ids", "flat_values")

    def __init__(self, bias: Mapping[int, float]) -> None:
        super().__init__(bias)
        self.flat_ids = array("i", bias)
        self.flat_values = array("f", bias.values())


_NO_BIAS = FlatBias({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawParams(DrawNumbers):
    """How a sequence draws its tokens, as far as it is the same at every position. Made once per
    request, and compared by identity. The numbers are the rows of core/sampling.py; their meaning
    and the order of operations are in backends/reference/sampling.py."""

    bias: FlatBias = field(default_factory=lambda: _NO_BIAS)  # added to the logits
    allowed: Collection[int] | None = None  # all other tokens are dropped
    # The numbers in the form that backends use, in the table's order.
    filters: tuple[float, ...] = field(init=False)
    penalties: tuple[float, ...] = field(init=False)
    # Whether the tokens so far change a draw: then a row has its history in `RowExtra`.
    penalizes: bool = field(init=False)
    # Whether the logits are changed before a draw, even without a `RowExtra`.
    adjusts: bool = field(init=False)
    # Whether a draw is anything but the argmax of the model's logits.
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
    """What only few rows of a plan have: limits on a draw that change from position to position,
    the tokens that penalties apply to, and requests for results other than a token."""

    banned: Collection[int] = ()  # tokens that may not be drawn
    # One bit per token: t may be drawn if mask[t >> 3] >> (t & 7) & 1. Tokens past the end of the
    # mask may not be drawn; bits past the vocabulary are ignored.
    mask: bytes | None = None
    # If the draw has penalties: the sequence's tokens up to the row's last one, and how many of
    # them are the prompt's. A PREVIOUS token is not in the list, but counts as output; so do a
    # row's drafts, at the places behind them.
    history: Sequence[int] = ()
    prompt_tokens: int = 0
    targets: list[int] | None = None  # one id per token, to be scored as its successor
    top_logprobs: int = 0  # likeliest tokens to return with the drawn token and each target
    pool: bool = False  # return the sum of its tokens' hidden states

    @property
    def adjusts(self) -> bool:
        """Whether anything here changes the logits that a token is drawn from."""
        return self.mask is not None or len(self.banned) > 0


NO_EXTRA = RowExtra()  # for rows that have none; nobody changes it


@dataclass(slots=True, kw_only=True)
class Drafts:
    """A row's last tokens are guesses, so many as there are uniforms. What the row's other columns
    and its extra say of a draw is about the place after its last known token; this is about the
    places after each draft:

    tokens      [ known ........ | draft | draft ]
    drawn after                ^ row   ^ 0     ^ 1
    """

    uniforms: list[float]
    banned: Sequence[Collection[int]] = ()  # as `RowExtra.banned`; empty if none is at any place
    masks: Sequence[bytes | None] = ()  # likewise `RowExtra.mask`

    def __len__(self) -> int:
        return len(self.uniforms)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """Everything that one step computes. Row i belongs to one sequence:

    positions   0 ........ starts[i] ............ starts[i] + counts[i]
                [ in blocks ][ computed now       ]

    `token_ids` holds the rows' tokens one after the other; other columns have one value per row.
    """

    sequence_ids: list[int] = field(default_factory=list)  # no duplicates
    counts: list[int] = field(default_factory=list)  # of tokens to be computed now, 1 or more
    starts: list[int] = field(default_factory=list)  # position of the first of them
    token_ids: list[int] = field(default_factory=list)
    # Block numbers from position 0 on, up to the last token that is computed now.
    tables: list[list[int]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the tables
    draws: list[DrawParams | None] = field(default_factory=list)  # of the token after the last one
    # In [0, 1): the only randomness of a draw. The same number gives the same token on every runner
    # and in every batch.
    uniforms: list[float] = field(default_factory=list)
    extras: dict[int, RowExtra] = field(default_factory=dict)  # by row; most plans have none
    drafts: dict[int, Drafts] = field(default_factory=dict)  # likewise
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
        drafts: Drafts | None = None,
    ) -> None:
        """The next row."""
        if extra is not None:
            self.extras[len(self.sequence_ids)] = extra
        if drafts is not None:
            self.drafts[len(self.sequence_ids)] = drafts
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
        self.drafts.pop(row, None)
        self.drafts = {at - (at > row): drafts for at, drafts in self.drafts.items()}


TopLogprobs = Sequence[tuple[int, float]]  # (token id, logprob), likeliest first


@dataclass(slots=True, kw_only=True)
class RowResult:
    """What a step returns for one row besides tokens, or why the row failed."""

    tops: Sequence[TopLogprobs] = ()  # for each drawn token
    target_logprobs: Sequence[float] = ()
    target_tops: Sequence[TopLogprobs] = ()
    # If asked for: the last hidden states after the final norm, summed over the row's tokens in
    # double precision.
    pooled: list[float] | None = None
    error: str | None = None  # why this sequence failed; the others are not affected
    is_own_fault: bool = False  # whether the request's parameters caused it


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step computed, in columns: one value for each row of its plan, in the same order.

    Logprobs are those of the model's own distribution: no temperature, no penalties, no filters.
    """

    # Drawn; empty if none was asked for, or the row failed. With drafts: one for each place, or
    # those before the first place that failed, whose error is in `extras`.
    tokens: list[list[int]]
    logprobs: list[list[float]]  # theirs
    extras: dict[int, RowResult] = field(default_factory=dict)  # by row; most results have none
    compute_s: float = 0.0  # the whole step
    sample_s: float = 0.0  # of it, drawing and scoring tokens
    # Whether something was compiled or captured in it for the first time: its time says nothing
    # about the next such step.
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What a plan may not exceed."""

    max_batch_tokens: int
    max_sequences: int
    total_blocks: int
    block_tokens: int
    context_tokens: int
    steps_in_flight: int = 1  # plans that may be submitted and not yet collected
    # Whether a draw with penalties may follow PREVIOUS. If not, it has to wait for that token.
    counts_previous: bool = False
    # Numbers of tokens that a step is padded to, in ascending order; empty: to none.
    padded_tokens: tuple[int, ...] = ()
    draws_drafts: bool = False  # whether rows may end in drafts


class Runner(Protocol):
    """Computes plans in order. `submit` may return before the work is done."""

    @property
    def limits(self) -> RunnerLimits: ...

    @property
    def progress(self) -> int:
        """A counter that grows while work is being done, also within a step. If it stands still
        during a step, the runner hangs. Any thread may read it."""
        ...

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """The result of the oldest plan submitted and not yet collected."""
        ...

    def close(self) -> None:
        """Release threads and memory; nothing may be submitted afterwards."""
        ...


@runtime_checkable
class Threaded(Protocol):
    """What a runner that computes with threads offers besides."""

    @property
    def threads(self) -> int: ...

    def take_mean_threads(self) -> float:
        """The mean number of threads that computed at once since the last call. Not while a step
        is in flight."""
        ...


Contents = bytes | bytearray | memoryview  # of one block, as its runner lays it out


@runtime_checkable
class MovesBlocks(Protocol):
    """What a runner offers besides, whose blocks can be taken out and put back: to keep them on a
    disk, or to hand them to another engine. Nobody else knows what is in a block.

    Both calls are made by the thread that submits plans, and are done when they return. Blocks are
    read that no plan in flight writes, and written that no plan in flight touches at all."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def block_layout(self) -> str:
        """How a block's bytes lie. Where it is equal, and so are the model and what computes it,
        one runner's contents can be put into another's blocks."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        """A copy of each block, `block_bytes` long."""
        ...

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Contents]) -> None:
        """Put contents into blocks, each `block_bytes` long."""
        ...
