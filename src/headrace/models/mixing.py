"""What mixing tokens costs beyond products with weights: the FLOPs of scores and states, and the
bytes of keys, values and states that are read and written.

Formulas for one chunk of a sequence, in constant time. counting.py sums them over a step one by
one, closed_form.py over many. Knows no machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.models.kv import CONV_VALUE_BYTES, STATE_VALUE_BYTES, index_bytes
from headrace.models.layers import (
    CompressedSpec,
    HeadsSpec,
    IndexSpec,
    LatentSpec,
    Mixer,
    RecurrentSpec,
)


@dataclass(frozen=True, slots=True)
class Mixing:
    """Of one chunk in one layer."""

    flops: int = 0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    state_bytes: float = 0.0  # read and written


def mixing(mixer: Mixer, tokens: int, start: int, value_bytes: float) -> Mixing:
    """A chunk of `tokens` after `start` tokens that are kept."""
    match mixer:
        case HeadsSpec():
            return _heads(mixer, tokens, start, value_bytes)
        case LatentSpec():
            return _latent(mixer, tokens, start, value_bytes)
        case CompressedSpec():
            return _compressed(mixer, tokens, start, value_bytes)
        case RecurrentSpec():
            return _recurrent(mixer, tokens)


@dataclass(frozen=True, slots=True)
class DecodeTerm:
    """A cost for each key that a single token sees: all of them, or `cap` at most."""

    cap: int | None
    flops: int
    read_bytes: float


def decode_terms(mixer: Mixer, value_bytes: float) -> tuple[DecodeTerm, ...] | None:
    """What a single token after one or more costs, as terms to be summed over many sequences; None
    if it can't be said so. What it writes, and states, do not depend on the position."""
    match mixer:
        case HeadsSpec():
            dims = mixer.key_dim + mixer.value_dim
            cap = mixer.window if mixer.index is None else mixer.index.top
            if mixer.index is not None and mixer.window is not None:
                return None
            flops, read = 2 * mixer.heads * dims, mixer.kv_heads * dims * value_bytes
        case LatentSpec():
            # From the second token on, attending to the latent itself must be the cheaper way.
            saved = 2 * mixer.kv_rank + mixer.rope_dim - mixer.key_dim - mixer.value_dim
            if mixer.kv_rank * (mixer.nope_dim + mixer.value_dim) < 2 * saved:
                return None
            cap = None if mixer.index is None else mixer.index.top
            flops = 2 * mixer.heads * (2 * mixer.kv_rank + mixer.rope_dim)
            read = mixer.kept_values * value_bytes
        case RecurrentSpec():
            return ()
        case _:
            return None
    scores = DecodeTerm(None, _index_flops(mixer.index, 1), _index_read(mixer, 1))
    return (DecodeTerm(cap, flops, read), *((scores,) if mixer.index else ()))


def pairs(tokens: int, start: int, window: int | None) -> int:
    """How many (query, key) pairs are seen: token i of the chunk sees start + i + 1 keys, or the
    window's."""
    first, last = start + 1, start + tokens
    if window is None or last <= window:
        return (first + last) * tokens // 2
    growing = max(0, window - first)  # tokens that see fewer keys than the window holds
    return (first + window - 1) * growing // 2 + (tokens - growing) * window


def span(tokens: int, start: int, window: int | None) -> int:
    """How many kept positions a chunk reads, each once."""
    first = 0 if window is None else max(0, start - window + 1)
    return start + tokens - first


def entry_pairs(tokens: int, start: int, ratio: int, top: int | None) -> int:
    """How many (query, entry) pairs are seen, if a query sees each entry of `ratio` tokens that are
    all before or at it, and at most `top` of them."""
    return _entries_seen(start + tokens, ratio, top) - _entries_seen(start, ratio, top)


def _entries_seen(length: int, ratio: int, top: int | None) -> int:
    """The sum of min(n // ratio, top) for n from 1 to length."""
    if top is not None and length >= top * ratio:
        return _entries_seen(top * ratio - 1, ratio, None) + (length - top * ratio + 1) * top
    whole, rest = divmod(length, ratio)
    return ratio * whole * (whole - 1) // 2 + whole * (rest + 1)


def _heads(mixer: HeadsSpec, tokens: int, start: int, value_bytes: float) -> Mixing:
    top = None if mixer.index is None else mixer.index.top
    seen = pairs(tokens, start, mixer.window if top is None else top)
    # A query and a key, a score and a value: two multiply-adds for each value of a head.
    flops = 2 * seen * mixer.heads * (mixer.key_dim + mixer.value_dim)
    kept = mixer.kv_heads * (mixer.key_dim + mixer.value_dim) * value_bytes
    return Mixing(
        flops + _index_flops(mixer.index, pairs(tokens, start, None)),
        _chosen(span(tokens, start, mixer.window), tokens, top) * kept
        + _index_read(mixer, start + tokens),
        (tokens * kept if mixer.own_kv else 0.0) + index_bytes(mixer, tokens),
    )


def _latent(mixer: LatentSpec, tokens: int, start: int, value_bytes: float) -> Mixing:
    """Heads attend to the shared latent itself, or to keys and values that are made from it again
    for all earlier tokens: whichever is less. Making them for the chunk's own tokens is a product
    with a weight, and so is what the first way needs in its place (of the same size)."""
    top = None if mixer.index is None else mixer.index.top
    seen = pairs(tokens, start, top)
    shared = 2 * seen * mixer.heads * (2 * mixer.kv_rank + mixer.rope_dim)
    apart = 2 * seen * mixer.heads * (mixer.key_dim + mixer.value_dim)
    apart += 2 * start * mixer.kv_rank * mixer.heads * (mixer.nope_dim + mixer.value_dim)
    kept = mixer.kept_values * value_bytes
    return Mixing(
        min(shared, apart) + _index_flops(mixer.index, pairs(tokens, start, None)),
        _chosen(start + tokens, tokens, top) * kept + _index_read(mixer, start + tokens),
        tokens * kept + index_bytes(mixer, tokens),
    )


def _compressed(mixer: CompressedSpec, tokens: int, start: int, value_bytes: float) -> Mixing:
    seen = pairs(tokens, start, mixer.window)
    kept = mixer.head_dim * value_bytes
    read = span(tokens, start, mixer.window)
    written, scored = tokens, 0
    if mixer.ratio:
        top = None if mixer.index is None else mixer.index.top
        seen += entry_pairs(tokens, start, mixer.ratio, top)
        scored = entry_pairs(tokens, start, mixer.ratio, None)
        entries = (start + tokens) // mixer.ratio
        read += _chosen(entries, tokens, top)
        written += entries - start // mixer.ratio
    return Mixing(
        2 * seen * mixer.heads * 2 * mixer.head_dim + _index_flops(mixer.index, scored),
        read * kept + _index_read(mixer, start + tokens),
        written * kept + index_bytes(mixer, start + tokens) - index_bytes(mixer, start),
    )


def _recurrent(mixer: RecurrentSpec, tokens: int) -> Mixing:
    """Token by token. Kernels that take a prompt in pieces do other sums, of the same order."""
    token = mixer.state_values * mixer.state_flops + 2 * mixer.conv_kernel * mixer.conv_channels
    state = mixer.state_values * STATE_VALUE_BYTES + mixer.conv_values * CONV_VALUE_BYTES
    return Mixing(tokens * token, state_bytes=2.0 * state)


def _chosen(kept: int, tokens: int, top: int | None) -> int:
    """Positions that a chunk reads if each of its tokens chooses at most `top`."""
    return kept if top is None else min(kept, tokens * top)


def _index_flops(index: IndexSpec | None, scored: int) -> int:
    if index is None or not index.makes_keys:
        return 0
    return 2 * scored * index.heads * index.dim


def _index_read(mixer: HeadsSpec | LatentSpec | CompressedSpec, length: int) -> int:
    return index_bytes(mixer, length)
