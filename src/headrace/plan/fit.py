"""Whether a model fits on a GPU, by how much, and how far it could go: the ledger of serving, from
numbers.

Pure arithmetic, a fraction of a millisecond: a search may ask for thousands. What a model takes
comes in as a `Demand` (backends/demands.py makes it, from the backends' own formulas), what a GPU
has as bytes. Knows no GPU's name, no files and no text: fit_text.py shows the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.models.spec import ModelSpec
from headrace.models.stages import Stage
from headrace.plan.fit_work import Work
from headrace.plan.ledger import KvCost, Ledger, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The bytes of a model's weights on one GPU, by part."""

    precision: str  # "bf16", "fp8", "q4_k_m", ...
    parts: tuple[tuple[str, int], ...]  # name, bytes: embedding, attention, mlp, ...
    is_exact: bool = False  # added up from a file's own tensors, or as this engine packs them

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model takes on each of `tp` GPUs, as functions of how it is used."""

    spec: ModelSpec
    weights: Weights
    work: Work
    kv: KvCost  # its shape; the bytes per token are those of `sequence_bytes`
    sequence_bytes: Callable[[int], int]  # keys and values of one sequence of so many tokens
    state_bytes: int  # of one sequence, whatever its length: recurrent layers
    activation_bytes: Callable[[int, int], int]  # (max_batch_tokens, context_tokens)
    graphs_bytes: int
    runtime_bytes: int
    block_tokens: int
    max_batch_tokens: int
    max_sequences: int
    tp: int = 1
    stage: Stage | None = None  # of a pipeline: then weights, keys and values are its own
    draft: Demand | None = None  # a second model that proposes tokens, on the same GPUs
    notes: tuple[str, ...] = ()  # what a reader must know about these numbers
    runtime_words: str = "what draws need for a moment, library workspaces: an estimate"

    @property
    def kv_dtype(self) -> str:
        return self.kv.dtype

    @property
    def stages(self) -> int:
        return 1 if self.stage is None else self.stage.count

    @property
    def here(self) -> ModelSpec:
        """The layers that are on this GPU."""
        return self.spec if self.stage is None else self.stage.of(self.spec)

    def held_tokens(self, tokens: int) -> int:
        """A sequence holds whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def token_bytes(self, held_tokens: int) -> int:
        """A token of a sequence that holds so many, on average, as the pool is counted."""
        return -(-self.sequence_bytes(held_tokens) // held_tokens)

    def each_bytes(self, context_tokens: int) -> int:
        """What one more sequence of this length takes, its part of the draft model included."""
        held = self.held_tokens(context_tokens)
        own = self.token_bytes(held) * held + self.state_bytes
        return own + (0 if self.draft is None else self.draft.each_bytes(context_tokens))

    def fixed_bytes(self, context_tokens: int) -> int:
        """Everything that is there before the first sequence."""
        own = self.weights.bytes + self.graphs_bytes + self.runtime_bytes
        own += self.activation_bytes(self.max_batch_tokens, context_tokens)
        return own + self.draft_fixed_bytes(context_tokens)

    def draft_fixed_bytes(self, context_tokens: int) -> int:
        """The draft model shares the runtime, the graphs' pool and the step's buffers."""
        return 0 if self.draft is None else self.draft.weights.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The ledger of one GPU, beside what the GPU has."""

    demand: Demand
    context_tokens: int
    concurrency: int  # sequences of that context at one time
    memory_bytes: int  # of the GPU
    budget_bytes: int  # of it, what may be used
    ledger: Ledger
    state_bytes: int  # recurrent state of all sequences
    draft_bytes: int  # weights, keys and values of the draft model
    ranks: tuple[Demand, ...] = ()  # of all stages of a pipeline, this one's among them

    @property
    def total_bytes(self) -> int:
        return self.ledger.total_bytes + self.state_bytes + self.draft_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left of the budget; below 0: what is missing."""
        return self.budget_bytes - self.total_bytes

    @property
    def headroom_bytes(self) -> int:
        """What stays outside of the budget: for the driver, other processes and fragmentation."""
        return self.memory_bytes - self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    @property
    def most_sequences(self) -> int:
        """A sequence is on all stages, so that the fullest one bounds it."""
        return min(
            most_sequences(rank, self.budget_bytes, self.context_tokens)
            for rank in self.ranks or (self.demand,)
        )

    @property
    def longest_context(self) -> int:
        return min(
            longest_context(rank, self.budget_bytes, self.concurrency)
            for rank in self.ranks or (self.demand,)
        )


def fit_on(
    demand: Demand, *, memory_bytes: int, budget_bytes: int, context_tokens: int, concurrency: int
) -> Fit:
    """The ledger for `concurrency` sequences of `context_tokens` each."""
    held = demand.held_tokens(context_tokens)
    blocks = held // demand.block_tokens
    draft = 0
    if demand.draft is not None:
        draft = demand.draft.weights.bytes + concurrency * demand.draft.each_bytes(context_tokens)
    ledger = predict(
        demand.spec,
        weight_bytes=demand.weights.bytes,
        activation_bytes=demand.activation_bytes(demand.max_batch_tokens, context_tokens),
        kv_bytes_per_token=demand.token_bytes(held),
        kv_dtype=demand.kv_dtype,
        kv=demand.kv,
        graphs_bytes=demand.graphs_bytes,
        runtime_bytes=demand.runtime_bytes,
        total_blocks=blocks * concurrency,
        block_tokens=demand.block_tokens,
        max_batch_tokens=demand.max_batch_tokens,
        available_bytes=budget_bytes,
    )
    return Fit(
        demand=demand,
        context_tokens=context_tokens,
        concurrency=concurrency,
        memory_bytes=memory_bytes,
        budget_bytes=budget_bytes,
        ledger=ledger,
        state_bytes=demand.state_bytes * concurrency,
        draft_bytes=draft,
    )


def fit_stages(
    ranks: tuple[Demand, ...],
    *,
    memory_bytes: int,
    budget_bytes: int,
    context_tokens: int,
    concurrency: int,
) -> Fit:
    """The ledger of the fullest of several stages, which decides for all."""
    fits = [
        fit_on(
            rank,
            memory_bytes=memory_bytes,
            budget_bytes=budget_bytes,
            context_tokens=context_tokens,
            concurrency=concurrency,
        )
        for rank in ranks
    ]
    return replace(min(fits, key=lambda fit: fit.spare_bytes), ranks=ranks)


def most_sequences(demand: Demand, budget_bytes: int, context_tokens: int) -> int:
    """How many sequences of this length memory holds: the concurrency bound by keys and values."""
    left = budget_bytes - demand.fixed_bytes(context_tokens)
    each = demand.each_bytes(context_tokens)
    if left < 0:
        return 0
    return left // each if each else demand.max_sequences


def longest_context(demand: Demand, budget_bytes: int, concurrency: int) -> int:
    """The longest context that so many sequences may have at one time, up to the model's; 0: none.
    In whole blocks, but for the model's own."""

    def holds(tokens: int) -> bool:
        return most_sequences(demand, budget_bytes, tokens) >= concurrency

    whole, size = demand.spec.context_tokens, demand.block_tokens
    if holds(whole):
        return whole
    low, high = 0, whole // size  # blocks: `low` fits, `high` + 1 does not
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle * size):
            low = middle
        else:
            high = middle - 1
    return low * size


def budget_of(memory_bytes: int, share: float, reserved_bytes: int) -> int:
    """What may be used of a GPU that nothing else uses, as the CUDA backend decides it."""
    return min(int(share * memory_bytes), max(0, memory_bytes - reserved_bytes))
