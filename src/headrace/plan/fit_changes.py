"""The smallest change with which a model would fit: each is tried on the ledger, none is guessed.

Ordered by what a change costs: a smaller type of keys and values first, then a little less of what
was asked for, weights of 8 bits, of 4 bits, much less of what was asked for, and more GPUs last.
Knows no GPU and no file: how a change is tried comes in as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.plan.fit import Fit

_EIGHT_BITS, _FOUR_BITS = ("fp8", "int8"), ("int4",)
_SIXTEEN = frozenset({"bf16", "fp16", "fp32"})
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What may be changed."""

    precision: str
    kv_dtype: str
    tp: int
    context_tokens: int
    concurrency: int
    pp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A choice that fits, the flags that ask for it, and what it leaves."""

    flags: str
    words: str
    choice: Choice
    spare_bytes: int


Try = Callable[[Choice], Fit | None]  # None: not possible (no FP8, ranks that do not divide)


def changes(asked: Choice, fit: Fit, attempt: Try) -> list[Change]:
    """All single changes that fit, the smallest first; where none does, pairs of them."""
    found = list(_that_fit(_singles(asked, fit), attempt))
    if any(change.choice.tp == asked.tp for change in found):
        return found
    return [*_that_fit(_pairs(asked, attempt), attempt), *found]


def _that_fit(tries: Iterator[tuple[str, str, Choice]], attempt: Try) -> Iterator[Change]:
    ranks_found = False
    for flags, words, choice in tries:
        if "--tp" in flags and ranks_found:
            continue
        result = attempt(choice)
        if result is not None and result.fits:
            ranks_found = ranks_found or "--tp" in flags
            yield Change(flags=flags, words=words, choice=choice, spare_bytes=result.spare_bytes)


def _singles(asked: Choice, fit: Fit) -> Iterator[tuple[str, str, Choice]]:
    sequences, context = fit.most_sequences, fit.longest_context
    fewer = _fewer(asked, sequences)
    shorter = _shorter(asked, context)
    yield from _kv(asked)
    yield from (each for each in fewer if 2 * sequences >= asked.concurrency)
    yield from (each for each in shorter if 2 * context >= asked.context_tokens)
    yield from _weights(asked, _EIGHT_BITS)
    yield from _weights(asked, _FOUR_BITS)
    yield from (each for each in fewer if 2 * sequences < asked.concurrency)
    yield from (each for each in shorter if 2 * context < asked.context_tokens)
    yield from _ranks(asked)


def _pairs(asked: Choice, attempt: Try) -> Iterator[tuple[str, str, Choice]]:
    """A smaller type of weights, with a smaller type of keys and values or less of them."""
    for flags, words, choice in _weights(asked, (*_EIGHT_BITS, *_FOUR_BITS)):
        result = attempt(choice)
        if result is None:
            continue
        others = [*_kv(choice), *_fewer(choice, result.most_sequences)]
        others += _shorter(choice, result.longest_context)
        for more_flags, more_words, both in others:
            yield f"{flags} {more_flags}", f"{words}, and {more_words}", both


def _kv(asked: Choice) -> Iterator[tuple[str, str, Choice]]:
    if asked.kv_dtype in ("bf16", "f16", "f32"):
        changed = replace(asked, kv_dtype="fp8")
        yield "--kv-dtype fp8", "keys and values in 8 bits", changed


def _weights(asked: Choice, kinds: tuple[str, ...]) -> Iterator[tuple[str, str, Choice]]:
    four = asked.precision in _EIGHT_BITS or asked.precision.startswith("fp8")
    for kind in kinds:
        if asked.precision in _SIXTEEN or (four and kind in _FOUR_BITS):
            bits = 4 if kind in _FOUR_BITS else 8
            yield f"--quant {kind}", f"weights in {bits} bits", replace(asked, precision=kind)


def _fewer(asked: Choice, most: int) -> list[tuple[str, str, Choice]]:
    if not 1 <= most < asked.concurrency:
        return []
    words = f"{most:,} sequence{'s' if most > 1 else ''} at one time"
    return [(f"--concurrency {most}", words, replace(asked, concurrency=most))]


def _shorter(asked: Choice, longest: int) -> list[tuple[str, str, Choice]]:
    if not 256 <= longest < asked.context_tokens:  # a shorter one is of no use
        return []
    words = f"a context of {longest:,} tokens"
    return [(f"--context {longest}", words, replace(asked, context_tokens=longest))]


def _ranks(asked: Choice) -> Iterator[tuple[str, str, Choice]]:
    for tp in range(asked.tp + 1, _MOST_RANKS + 1):
        gpus = tp * asked.pp
        flags = f"--gpus {gpus} --tp {tp}" + (f" --pp {asked.pp}" if asked.pp > 1 else "")
        yield flags, f"{gpus} GPUs", replace(asked, tp=tp)
