"""The memory ledger: how much memory a model takes, row by row, predicted and allocated.

Pure values and arithmetic. A backend reports the sizes of its weights, blocks and activations; this
file adds up, compares and shows them. Knows no machine, no files and no backend.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from headrace.core.sizes import MIB, show_bytes
from headrace.models.spec import ModelSpec

AGREEMENT = 0.05  # how far apart a prediction and what was allocated may be

# An estimate, measured as resident memory of a process that had loaded no weights: the interpreter,
# numpy and our code; and for each token of a vocabulary its text, its id and its merge.
_RUNTIME_BYTES = 48 * MIB
_RUNTIME_BYTES_PER_TOKEN = 640
_ANSWERS = "past ones, to guess tokens from: at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCost:
    """What one token takes in the KV pool, and the numbers that this comes from."""

    layers: int
    kv_heads: int | None  # None: layers differ
    head_dim: int | None
    values: int  # keys and values of a token, all layers together
    dtype: str
    bytes_per_token: int

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str, bytes_per_token: int) -> KvCost:
        shapes = {(a.kv_heads, a.head_dim) for a in spec.attention}
        kv_heads, head_dim = shapes.pop() if len(shapes) == 1 else (None, None)
        return cls(
            layers=spec.layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            values=spec.kv_bytes_per_token(1),
            dtype=dtype,
            bytes_per_token=bytes_per_token,
        )

    def formula(self) -> str:
        # Scales and the like count with the values that they belong to.
        size = f"{self.bytes_per_token / self.values:.4g} bytes ({self.dtype})"
        if self.kv_heads is None:
            values = f"{self.values:,} values of {self.layers} layers"
        else:
            values = f"2 × {self.layers} layers × {self.kv_heads} KV heads × {self.head_dim}"
        return f"{values} × {size} = {self.bytes_per_token:,} bytes per token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """What a backend measured after it had allocated everything."""

    weights_bytes: int
    kv_pool_bytes: int
    activations_bytes: int
    graphs_bytes: int | None = None  # None: there are none, or they are not counted


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    predicted_bytes: int
    allocated_bytes: int

    @property
    def share(self) -> float:
        """The difference relative to the prediction: 0.02 is 2% more than predicted."""
        more = self.allocated_bytes - self.predicted_bytes
        if self.predicted_bytes == 0:
            return 0.0 if more == 0 else math.inf
        return more / self.predicted_bytes

    @property
    def agrees(self) -> bool:
        return abs(self.share) <= AGREEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All memory in use when the model serves its largest step."""

    weights_bytes: int
    kv_pool_bytes: int
    activations_bytes: int  # of the largest step
    runtime_bytes: int
    kv: KvCost
    total_blocks: int
    block_tokens: int
    max_batch_tokens: int
    graphs_bytes: int = 0  # launches captured on a GPU: an estimate
    draft_bytes: int = 0  # a draft model: its weights, activations, keys and values
    answers_bytes: int = 0  # past answers, to guess tokens from: at most
    available_bytes: int | None = None  # None: not known

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_pool_bytes + self.draft_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything except the KV pool."""
        return (
            self.weights_bytes
            + self.activations_bytes
            + self.graphs_bytes
            + self.answers_bytes
            + self.runtime_bytes
        )

    @property
    def kv_tokens(self) -> int:
        return self.total_blocks * self.block_tokens

    def compare(self, allocated: Allocated) -> tuple[Difference, ...]:
        """Row by row, and their sum; without the runtime, which is only an estimate."""
        rows = [
            Difference(name, getattr(self, field), getattr(allocated, field))
            for name, field in _COMPARED
        ]
        predicted = sum(row.predicted_bytes for row in rows)
        total = sum(row.allocated_bytes for row in rows)
        return (*rows, Difference("together", predicted, total))

    def rows(self) -> list[tuple[str, int, str]]:
        """(name, bytes, what they are of)"""
        pool = f"{self.kv_tokens:,} tokens in {self.total_blocks:,} blocks of {self.block_tokens}"
        return [
            ("weights", self.weights_bytes, ""),
            ("KV pool", self.kv_pool_bytes, pool),
            ("activations", self.activations_bytes, f"{self.max_batch_tokens:,} tokens per step"),
            *([("graphs", self.graphs_bytes, "at most: an estimate")] if self.graphs_bytes else []),
            *([("draft model", self.draft_bytes, "weights, KV pool")] if self.draft_bytes else []),
            *([("answers", self.answers_bytes, _ANSWERS)] if self.answers_bytes else []),
            ("runtime", self.runtime_bytes, "interpreter, tokenizer, code: an estimate"),
        ]

    def render(self, allocated: Allocated | None = None) -> str:
        """A table to print; with `allocated`, what was predicted beside what was allocated."""
        differences = {d.name: d for d in self.compare(allocated)} if allocated else {}
        room = "" if self.available_bytes is None else f"of {show_bytes(self.available_bytes)} free"
        lines = []
        for name, predicted, words in [*self.rows(), ("total", self.total_bytes, room)]:
            line = f"{name:<12}{show_bytes(predicted):>11}"
            if differences:
                found = differences.get(name)
                shown = "" if found is None else show_bytes(found.allocated_bytes)
                share = "" if found is None else f"{found.share:+.1%}"
                line += f"{shown:>12}{share:>8}"
            lines.append(f"{line}   {words}".rstrip())
        if differences:
            lines.insert(0, f"{'':<12}{'predicted':>11}{'allocated':>12}")
        return "\n".join([*lines, f"a token's KV: {self.kv.formula()}"])

    def facts(self) -> dict[str, object]:
        """As JSON values."""
        return {
            **asdict(self),
            "kv_tokens": self.kv_tokens,
            "total_bytes": self.total_bytes,
        }


_COMPARED = (
    ("weights", "weights_bytes"),
    ("KV pool", "kv_pool_bytes"),
    ("activations", "activations_bytes"),
)


def predict(
    spec: ModelSpec,
    *,
    weight_bytes: int,
    activation_bytes: int,
    kv_bytes_per_token: int,
    kv_dtype: str,
    total_blocks: int,
    block_tokens: int,
    max_batch_tokens: int,
    graphs_bytes: int = 0,
    runtime_bytes: int | None = None,
    answers_bytes: int = 0,
    available_bytes: int | None = None,
    kv: KvCost | None = None,
) -> Ledger:
    """The ledger of a model with these sizes and this pool. `kv` was made before, for another
    number of bytes per token, since going through a model's layers takes time."""
    return Ledger(
        weights_bytes=weight_bytes,
        kv_pool_bytes=total_blocks * block_tokens * kv_bytes_per_token,
        activations_bytes=activation_bytes,
        graphs_bytes=graphs_bytes,
        answers_bytes=answers_bytes,
        runtime_bytes=_RUNTIME_BYTES + spec.vocab_size * _RUNTIME_BYTES_PER_TOKEN
        if runtime_bytes is None
        else runtime_bytes,
        kv=KvCost.of(spec, kv_dtype, kv_bytes_per_token)
        if kv is None
        else replace(kv, bytes_per_token=kv_bytes_per_token),
        total_blocks=total_blocks,
        block_tokens=block_tokens,
        max_batch_tokens=max_batch_tokens,
        available_bytes=available_bytes,
    )
