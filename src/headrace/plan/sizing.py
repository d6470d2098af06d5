"""How large the KV pool and the context may be: a budget and a ledger in, numbers or a refusal out.

Pure: available memory and the backend's sizes come in as values. A refusal shows the ledger and
names the exact flag that would work. Knows no backend: backends know this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.core.config import EngineConfig, StepSizes
from headrace.core.drafter import kept_bytes
from headrace.core.errors import ConfigError, MemoryFitError
from headrace.core.sizes import parse_bytes, show_bytes, write_bytes
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Ledger, predict

KV_FRACTION = 0.5  # of the memory that weights, activations and runtime leave, by default
_STEADY = 0.95
USEFUL_TOKENS = 256  # a smaller context is only used if it was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """How much memory a backend would need for a model, and how much it may use."""

    spec: ModelSpec
    sizes: StepSizes  # as asked for; the backend's own where nothing was
    weight_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    activation_bytes: Callable[[int, int], int]  # (max_batch_tokens, context_tokens) -> bytes
    available_bytes: int | None = None  # None: not known, and not looked at
    graphs_bytes: int = 0
    runtime_bytes: int | None = None  # None: what a process on the CPU takes
    kv_fraction: float = KV_FRACTION  # where nothing is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What was chosen."""

    sizes: StepSizes
    total_blocks: int
    context_tokens: int
    ledger: Ledger
    notes: tuple[str, ...] = ()  # choices that a user might not expect

    def with_pool(self, total_blocks: int, context_tokens: int) -> Sizing:
        """As it is, with a pool of another size: that of the rank which has the least room."""
        ledger = replace(
            self.ledger,
            total_blocks=total_blocks,
            kv_pool_bytes=total_blocks * self.sizes.block_tokens * self.ledger.kv.bytes_per_token,
        )
        return replace(
            self, total_blocks=total_blocks, context_tokens=context_tokens, ledger=ledger
        )


def agreed(sizings: Sequence[Sizing]) -> list[Sizing]:
    """All ranks' sizings, with the pool that fits everywhere."""
    blocks = min(each.total_blocks for each in sizings)
    context = min(each.context_tokens for each in sizings)
    return [each.with_pool(blocks, context) for each in sizings]


def size_pool(footprint: Footprint, config: EngineConfig) -> Sizing:
    """Blocks and context for this model."""
    return _Sizer(footprint, config).size()


class _Sizer:
    def __init__(self, footprint: Footprint, config: EngineConfig) -> None:
        self.footprint, self.config = footprint, config
        self.available = available = footprint.available_bytes
        spec, asked = footprint.spec, config.context_tokens
        if asked is not None and asked > spec.context_tokens:
            raise ConfigError(
                f"context_tokens is {asked}; the model's context is {spec.context_tokens}.",
                f"Set context_tokens to {spec.context_tokens} or less.",
                param="context_tokens",
            )
        self.longest = spec.context_tokens if asked is None else asked
        self.sizes = footprint.sizes
        self.block_bytes = self.sizes.block_tokens * footprint.kv_bytes_per_token
        # With the longest context: a shorter one takes no more.
        self.fixed_bytes = self.ledger(0, self.longest).fixed_bytes
        self.left = None if available is None else max(0, available - self.fixed_bytes)

    def size(self) -> Sizing:
        blocks, needed = self.choose_blocks(), self.needed_blocks()
        if self.left is not None and self.left < needed * self.block_bytes:
            raise self.nothing_fits(needed)
        if self.left is not None and self.left < blocks * self.block_bytes:
            raise self.too_large(blocks)
        if blocks < needed:
            raise self.too_small(blocks, needed)
        context = min(self.longest, blocks * self.sizes.block_tokens)
        notes = () if context == self.longest else (self.note_context(context),)
        ledger = self.ledger(blocks, context)
        return Sizing(
            sizes=self.sizes,
            total_blocks=blocks,
            context_tokens=context,
            ledger=ledger,
            notes=notes,
        )

    def choose_blocks(self) -> int:
        config = self.config
        if config.kv_tokens is not None:
            return self.blocks_for(config.kv_tokens)
        if config.kv_memory_bytes is not None:
            return config.kv_memory_bytes // self.block_bytes
        if self.left is None:
            if config.kv_fraction is not None:
                raise ConfigError(
                    f"kv_fraction is {config.kv_fraction:g}, but this machine does not report how "
                    "much memory is free.",
                    "Set kv_memory or kv_tokens instead.",
                    param="kv_fraction",
                )
            return self.blocks_for(self.longest)
        if config.kv_fraction is not None:
            return int(config.kv_fraction * self.left) // self.block_bytes
        # Not more than all sequences together can use.
        most = self.sizes.max_sequences * self.blocks_for(self.longest)
        return min(most, int(self.footprint.kv_fraction * self.left) // self.block_bytes)

    def needed_blocks(self) -> int:
        """The smallest useful pool: for the requested context, or else for USEFUL_TOKENS."""
        config = self.config
        if config.context_tokens is not None:
            return self.blocks_for(config.context_tokens)
        explicit = config.kv_tokens is not None or config.kv_memory is not None
        return 1 if explicit else self.blocks_for(min(USEFUL_TOKENS, self.longest))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.sizes.block_tokens)

    def ledger(self, blocks: int, context: int, batch: int | None = None) -> Ledger:
        batch = self.sizes.max_batch_tokens if batch is None else batch
        return predict(
            self.footprint.spec,
            weight_bytes=self.footprint.weight_bytes,
            activation_bytes=self.footprint.activation_bytes(batch, context),
            kv_bytes_per_token=self.footprint.kv_bytes_per_token,
            kv_dtype=self.footprint.kv_dtype,
            graphs_bytes=self.footprint.graphs_bytes,
            runtime_bytes=self.footprint.runtime_bytes,
            # In the host's memory: where a GPU's is counted it is none of it.
            answers_bytes=0
            if self.footprint.runtime_bytes is not None
            else kept_bytes(self.sizes.speculate),
            total_blocks=blocks,
            block_tokens=self.sizes.block_tokens,
            max_batch_tokens=batch,
            available_bytes=self.available,
        )

    def note_context(self, context: int) -> str:
        note = f"the context is limited to {context:,} tokens by the KV pool; the model's is "
        note += f"{self.longest:,}"
        whole = self.blocks_for(self.longest)
        if self.left is None or whole * self.block_bytes <= self.left:
            note += f" ({self.pool_flag(whole)} holds it)"
        return note

    def nothing_fits(self, needed: int) -> MemoryFitError:
        """Not even the smallest useful pool fits beside the rest."""
        ledger = self.ledger(needed, self.longest)
        free = self.available or 0
        remedy = self.smaller_settings(needed) or (
            f"Free {show_bytes(ledger.total_bytes - free)} more, or choose a smaller model or one "
            "quantized to fewer bits."
        )
        return MemoryFitError(
            f"The model does not fit: it takes {show_bytes(ledger.total_bytes)} with a KV pool of "
            f"{ledger.kv_tokens:,} tokens, and {show_bytes(free)} are free.",
            remedy,
            param="context_tokens" if self.config.context_tokens is not None else None,
            detail=ledger.render(),
        )

    def smaller_settings(self, needed: int) -> str:
        """Flags with which the model would fit, the most restrictive last; empty if none do."""
        batch, size = self.sizes.max_batch_tokens, self.sizes.block_tokens
        useful = min(USEFUL_TOKENS, self.longest)
        tries = [(batch, context) for context in _halved(self.longest, useful)]
        most = (self.left or 0) // self.block_bytes * size
        if most >= useful:
            tries.insert(0, (batch, most))
        tries += [(b, min(self.longest, needed * size)) for b in _halved(batch, 1)]
        for tokens, context in tries:
            blocks = self.blocks_for(context)
            ledger = self.ledger(blocks, context, tokens)
            if ledger.total_bytes <= (self.available or 0):
                flags = f"--context-tokens {context} --kv-tokens {blocks * size}"
                return self.advise(
                    flags if tokens == batch else f"--max-batch-tokens {tokens} {flags}"
                )
        return ""

    def too_large(self, blocks: int) -> MemoryFitError:
        """The requested pool does not fit into memory."""
        left = self.left or 0
        ledger = self.ledger(blocks, self.longest)
        param = "kv_tokens" if self.config.kv_tokens is not None else "kv_memory"
        # Free memory changes all the time: the advice should still work a moment later.
        text = write_bytes(max(int(left * _STEADY), self.block_bytes), up=False)
        enough = parse_bytes(text, param) // self.block_bytes >= self.needed_blocks()
        most_tokens = left // self.block_bytes * self.sizes.block_tokens
        return MemoryFitError(
            f"{param} asks for a KV pool of {show_bytes(ledger.kv_pool_bytes)}; {show_bytes(left)} "
            f"of {show_bytes(self.available or 0)} free memory are left for it.",
            self.advise(f"--kv-memory {text}" if enough else f"--kv-tokens {most_tokens}"),
            param=param,
            detail=ledger.render(),
        )

    def too_small(self, blocks: int, needed: int) -> MemoryFitError:
        """The context does not fit into the requested pool."""
        asked, size = self.config.context_tokens, self.sizes.block_tokens
        allows = show_bytes(blocks * self.block_bytes)
        works = self.pool_flag(needed)
        if asked is not None and blocks:
            works += f", or --context-tokens {blocks * size}"
        return MemoryFitError(
            f"A context of {asked or needed * size:,} tokens needs a KV pool of "
            f"{show_bytes(needed * self.block_bytes)}; "
            f"{self.budget or self.share_words} allows {allows}, which holds "
            f"{blocks * size:,}.",
            self.advise(works),
            param="context_tokens" if asked is not None else self.budget,
            detail=self.ledger(needed, self.longest).render(),
        )

    @property
    def share_words(self) -> str:
        half = self.footprint.kv_fraction == KV_FRACTION
        return "half of the memory left" if half else "the memory left"

    @property
    def budget(self) -> str | None:
        """The setting that determines the size of the pool."""
        names = ("kv_memory", "kv_tokens", "kv_fraction")
        return next((n for n in names if getattr(self.config, n) is not None), None)

    def pool_flag(self, blocks: int) -> str:
        """The flag for a pool of at least this many blocks, and no more than memory holds."""
        text = write_bytes(blocks * self.block_bytes, up=True)
        if self.left is not None and parse_bytes(text, "kv_memory") > self.left:
            return f"--kv-tokens {blocks * self.sizes.block_tokens}"
        return f"--kv-memory {text}"

    def advise(self, flags: str) -> str:
        given = "" if self.budget is None else f"--{self.budget.replace('_', '-')}"
        return f"Set {flags}" + (
            f" in place of {given}." if "--kv-" in flags and given not in flags else "."
        )


def _halved(start: int, least: int) -> list[int]:
    """start / 2, start / 4, ... down to `least`."""
    found = []
    while (start := start // 2) >= least:
        found.append(start)
    return found
