"""The one seam between deciding and computing: StepPlan in, StepResult out, through a Runner.

A plan is plain ints and lists. There is no prefill and no decode here: each entry asks for some
tokens of a sequence to be computed, and perhaps for what follows them. Whoever writes plans does
not know what computes them; whoever computes does not know why.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

# In place of a token id: the token that this sequence drew in the step before, which whoever wrote
# the plan did not know yet. Only as an entry's single token, and only where `steps_in_flight` > 1.
PREVIOUS = -1


class FlatBias(dict[int, float]):
    """A bias whose ids and values lie in arrays too, made once: a backend takes those in every step
    of every continuation, and going through a mapping would cost as much as the mapping is long."""

    __slots__ = ("flat_ids", "flat_values")

    def __init__(self, bias: Mapping[int, float]) -> None:
        super().__init__(bias)
        self.flat_ids = array("i", bias)
        self.flat_values = array("f", bias.values())


@dataclass(slots=True, kw_only=True)  # not frozen: one is made for every token of every sequence
class Draw:
    """How to draw one token from the distribution after an entry's last token.

    `uniform` in [0, 1) is the only randomness, chosen by whoever plans: the same number gives the
    same token on every runner and in every batch. Order: `bias` is added, tokens outside `allowed`
    or `mask` and in `banned` are dropped, penalties, then temperature and the filters
    (backends/reference/sampling.py spells it out).
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # of tokens so far: divides positive logits, multiplies others
    presence_penalty: float = 0.0  # subtracted once from each token of the output so far
    frequency_penalty: float = 0.0  # subtracted as often as it came in the output
    # What penalties are about: the sequence's tokens up to the entry's last, of which so many are
    # the prompt's. One that is PREVIOUS is not in it, and counts all the same: as output.
    history: Sequence[int] = ()
    prompt_tokens: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Collection[int] | None = None
    banned: Collection[int] = ()
    # A bit a token: t may be drawn if mask[t >> 3] >> (t & 7) & 1. Tokens past its end may not be;
    # bits past the vocabulary mean nothing.
    mask: bytes | None = None
    uniform: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepEntry:
    """One sequence's share of a step.

    positions   0 ........ start ............ start + len(token_ids)
                [ in blocks ][ computed now  ]
    """

    sequence_id: int
    token_ids: list[int]  # to be computed now, in order
    start: int  # position of the first of them; all before it are in the blocks
    block_table: list[int]  # block numbers, covering position start + len(token_ids) - 1
    draw: Draw | None = None  # sample after the last token
    targets: list[int] | None = None  # score: one id a token, its logprob as the token's successor
    top_logprobs: int = 0  # how many of the likeliest to give with the drawn token and each target
    pool: bool = False  # give the sum of its tokens' hidden states


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """Everything one step computes."""

    entries: list[StepEntry]
    # (from, to): blocks to be copied whole before anything is computed
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def batch_tokens(self) -> int:
        return sum([len(entry.token_ids) for entry in self.entries])


TopLogprobs = Sequence[tuple[int, float]]  # (token id, logprob), likeliest first


@dataclass(slots=True, kw_only=True)
class EntryResult:
    """What a step found for one entry, in the plan's order. Logprobs are of the distribution as
    the model gave it: no temperature, no penalties, no filters. One is made for every token of
    every sequence: what most do not ask for is the same empty tuple."""

    sequence_id: int
    token_id: int | None = None  # the drawn token
    logprob: float = 0.0  # of the drawn token
    top: TopLogprobs = ()
    target_logprobs: Sequence[float] = ()
    target_top: Sequence[TopLogprobs] = ()
    # The sum over the entry's tokens of the last hidden states, after the final norm, if asked for;
    # added up in double precision.
    pooled: list[float] | None = None
    error: str | None = None  # this sequence failed, alone
    is_own_fault: bool = False  # because of what its draw asked for


class Drawn(NamedTuple):
    """What most steps find: a token and its logprob for every entry, in the plan's order, and
    nothing else."""

    sequence_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]

    def entry_results(self) -> list[EntryResult]:
        rows = zip(self.sequence_ids, self.token_ids, self.logprobs, strict=True)
        return [EntryResult(sequence_id=s, token_id=t, logprob=p) for s, t, p in rows]


class StepResult:
    """Of one step. A runner gives `entries`, or `drawn` where that says it all: whoever asks for
    the entries gets them either way, at the cost of making them."""

    __slots__ = ("_entries", "compute_s", "drawn", "sample_s")

    def __init__(
        self,
        *,
        entries: list[EntryResult] | None = None,
        drawn: Drawn | None = None,
        compute_s: float = 0.0,  # the whole step
        sample_s: float = 0.0,  # of it, drawing and scoring tokens
    ) -> None:
        assert (entries is None) != (drawn is None)
        self._entries = entries
        self.drawn = drawn
        self.compute_s = compute_s
        self.sample_s = sample_s

    @property
    def entries(self) -> list[EntryResult]:
        if self._entries is None:
            assert self.drawn is not None
            self._entries = self.drawn.entry_results()
        return self._entries


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
