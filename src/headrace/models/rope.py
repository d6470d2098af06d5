"""Rotary frequencies: every supported scaling, from config.json or GGUF metadata, as a RopeSpec.

Plain floats; backends do the rotation. `dynamic` scaling is refused: its frequencies change with
the length of a sequence, so cached keys would become wrong as it grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.models.dims import MAX_CONTEXT
from headrace.models.fields import Fields, positive_numbers
from headrace.models.spec import RopeSpec

SUPPORTED = "default, linear, llama3, yarn, longrope"
_MAX_BASE = 1e12
_FACTOR = {"low": 1e-6, "high": 1e6}  # of a stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """What a scaling starts from."""

    base: float
    rotary_dim: int
    original_tokens: int  # the context before it was stretched
    longest_tokens: int  # and after
    served_tokens: int  # what will be served of it


def inverse_frequencies(base: float, rotary_dim: int) -> tuple[float, ...]:
    return tuple(base ** (-i / rotary_dim) for i in range(0, rotary_dim, 2))


def divide(frequencies: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(f / factor for f, factor in zip(frequencies, factors, strict=True))


def llama3_frequencies(
    frequencies: Sequence[float], *, factor: float, low: float, high: float, original_tokens: int
) -> tuple[float, ...]:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""

    def stretch(frequency: float) -> float:
        turns = original_tokens * frequency / (2 * math.pi)  # within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / factor

    return tuple(stretch(frequency) for frequency in frequencies)


def yarn_frequencies(
    shape: RopeShape, *, factor: float, beta_fast: float, beta_slow: float, truncate: bool
) -> tuple[float, ...]:
    """Dimensions that rotate more than `beta_fast` times are kept, those that rotate fewer than
    `beta_slow` times are stretched."""

    def dimension(turns: float) -> float:
        ratio = shape.original_tokens / (turns * 2 * math.pi)
        return shape.rotary_dim * math.log(ratio) / (2 * math.log(shape.base))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.rotary_dim - 1)
    if low == high:
        high += 0.001

    def blend(index: int, frequency: float) -> float:
        stretched = min(max((index - low) / (high - low), 0.0), 1.0)
        return stretched * frequency / factor + (1 - stretched) * frequency

    plain = inverse_frequencies(shape.base, shape.rotary_dim)
    return tuple(blend(index, frequency) for index, frequency in enumerate(plain))


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_scale(factor: float, original_tokens: int) -> float:
    if factor <= 1 or original_tokens <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_tokens))


# -- config.json ---------------------------------------------------------------------------------


def rope_section(config: Fields) -> Fields:
    """The scaling fields, from transformers 4's rope_scaling or 5's rope_parameters; empty if there
    are none."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    return section or Fields({}, config.where, "rope_parameters.")


def rope_base(config: Fields, section: Fields, default: float = 10_000.0) -> float:
    holder = section if section.has("rope_theta") else config
    return holder.number("rope_theta", low=1, high=_MAX_BASE, default=default)


def partial_rotary_factor(config: Fields, section: Fields) -> float:
    holder = section if section.has("partial_rotary_factor") else config
    return holder.number("partial_rotary_factor", high=1, default=1)


def original_context(config: Fields, section: Fields, default: int) -> int:
    """The context before stretching; Phi-3's, outside of the section, takes precedence."""
    name = "original_max_position_embeddings"
    holder = config if config.has(name) else section
    return holder.integer(name, high=MAX_CONTEXT, default=default)


def rope_type(section: Fields) -> str:
    name = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(name, default="default")
    kind = "longrope" if kind == "su" else kind
    if kind not in SUPPORTED.split(", "):
        raise section.unsupported(name, f"rope scaling {SUPPORTED}")
    return kind


def longest_context(config: Fields, section: Fields, stated: int) -> int:
    """The stated context, or more if yarn stretches it and the file does not state the result (as
    with Qwen's instructions for long texts)."""
    if rope_type(section) != "yarn" or not section.has("factor"):
        return stated
    factor = section.number("factor", **_FACTOR)
    original = original_context(config, section, stated)
    return max(stated, min(int(factor * original), MAX_CONTEXT))


def rope_from_config(section: Fields, shape: RopeShape) -> RopeSpec:
    """The RopeSpec that a scaling section describes."""
    kind = rope_type(section)
    plain = inverse_frequencies(shape.base, shape.rotary_dim)
    if kind == "linear":
        factor = section.number("factor", **_FACTOR)
        return RopeSpec(inv_freq=tuple(frequency / factor for frequency in plain))
    if kind == "llama3":
        return RopeSpec(inv_freq=_llama3_from_config(section, plain, shape.original_tokens))
    if kind == "yarn":
        return _yarn_from_config(section, shape)
    if kind == "longrope":
        return _longrope_from_config(section, shape)
    return RopeSpec(inv_freq=plain)


def _llama3_from_config(
    section: Fields, plain: tuple[float, ...], original_tokens: int
) -> tuple[float, ...]:
    low = section.number("low_freq_factor")
    high = section.number("high_freq_factor")
    if high <= low:
        raise section.malformed("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    return llama3_frequencies(
        plain,
        factor=section.number("factor", **_FACTOR),
        low=low,
        high=high,
        original_tokens=original_tokens,
    )


def _yarn_from_config(section: Fields, shape: RopeShape) -> RopeSpec:
    factor = section.number("factor", default=shape.longest_tokens / shape.original_tokens)
    scale = yarn_scale(factor)
    if section.has("attention_factor"):
        scale = section.number("attention_factor")
    elif section.has("mscale") and section.has("mscale_all_dim"):
        above = yarn_scale(factor, section.number("mscale"))
        scale = above / yarn_scale(factor, section.number("mscale_all_dim"))
    frequencies = yarn_frequencies(
        shape,
        factor=factor,
        beta_fast=section.number("beta_fast", default=32),
        beta_slow=section.number("beta_slow", default=1),
        truncate=section.flag("truncate", default=True),
    )
    return RopeSpec(inv_freq=frequencies, scale=scale)


def _longrope_from_config(section: Fields, shape: RopeShape) -> RopeSpec:
    """One set of factors for the lifetime of a server, chosen by the context that it serves:
    changing it as a sequence grows would make the keys in its blocks wrong."""
    count = shape.rotary_dim // 2
    long = section.numbers("long_factor", count)
    short = section.numbers("short_factor", count)
    factors = long if shape.served_tokens > shape.original_tokens else short
    ratio = section.number("factor", default=shape.longest_tokens / shape.original_tokens)
    scale = section.number("attention_factor", default=longrope_scale(ratio, shape.original_tokens))
    plain = inverse_frequencies(shape.base, shape.rotary_dim)
    return RopeSpec(inv_freq=divide(plain, factors), scale=scale)


# -- GGUF ----------------------------------------------------------------------------------------


def rope_from_gguf(
    metadata: Fields,
    shape: RopeShape,
    factors: Sequence[float] | None,
    *,
    interleaved: bool = False,
) -> RopeSpec:
    """`factors` are the values of the file's rope_freqs or rope_factors tensor: divisors."""
    count = shape.rotary_dim // 2
    plain = inverse_frequencies(shape.base, shape.rotary_dim)
    kind = metadata.text("rope.scaling.type", default="none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.unsupported("rope.scaling.type", "none, linear, yarn, longrope")
    if kind == "longrope" and factors is None:
        raise metadata.malformed("rope.scaling.type", "rope factors tensors with longrope")
    scale = metadata.number("rope.scaling.attn_factor", default=1)
    if factors is not None:
        checked = positive_numbers(factors, count, f"{metadata.where}: the rope factors tensor")
        plain = divide(plain, checked)
    if kind == "linear" or (kind == "none" and metadata.has("rope.scale_linear")):
        name = "rope.scaling.factor" if kind == "linear" else "rope.scale_linear"
        factor = metadata.number(name, **_FACTOR)
        plain = tuple(frequency / factor for frequency in plain)
    elif kind == "yarn":
        return _yarn_from_gguf(metadata, shape, factors is not None, scale, interleaved)
    return RopeSpec(inv_freq=plain, scale=scale, interleaved=interleaved)


def _yarn_from_gguf(
    metadata: Fields, shape: RopeShape, has_factors: bool, scale: float, interleaved: bool
) -> RopeSpec:
    for name in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"):
        if metadata.has(name):
            raise metadata.unsupported(name, "yarn without it")
    if has_factors:
        raise metadata.unsupported("rope.scaling.type", "yarn without a rope factors tensor")
    factor = metadata.number("rope.scaling.factor", **_FACTOR)
    frequencies = yarn_frequencies(
        shape,
        factor=factor,
        beta_fast=metadata.number("rope.scaling.yarn_beta_fast", default=32),
        beta_slow=metadata.number("rope.scaling.yarn_beta_slow", default=1),
        truncate=True,
    )
    scale *= metadata.number("rope.scaling.yarn_attn_factor", default=1) * yarn_scale(factor)
    return RopeSpec(inv_freq=frequencies, scale=scale, interleaved=interleaved)
