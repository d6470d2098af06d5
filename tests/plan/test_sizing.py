"""The KV pool under every kind of budget, and whether a refusal's advice works."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.core.config import EngineConfig, KvDtype, StepSizes
from headrace.core.errors import ConfigError, MemoryFitError
from headrace.core.sizes import KIB, MIB
from headrace.models.spec import AttentionSpec, ModelSpec, RopeSpec
from headrace.plan.sizing import Footprint, Sizing, agreed, size_pool

SPEC = ModelSpec(
    family="test",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    context_tokens=8192,
    norm_eps=1e-5,
    attention=tuple(
        AttentionSpec(
            layer=i, heads=4, kv_heads=2, head_dim=16, scale=1.0, rope=RopeSpec(inv_freq=(1.0,))
        )
        for i in range(8)
    ),
)
TOKEN_BYTES = 2 * 8 * 2 * 16 * 2  # 1 KiB: a block of 16 takes 16 KiB
FIXED = 100 * MIB + 48 * MIB + 640 * 1000  # weights and runtime; activations come on top


DEFAULTS = StepSizes(
    max_batch_tokens=512,
    max_sequences=64,
    block_tokens=16,
    kv_dtype=KvDtype.F16,
    overlap=False,
    max_step_growth=2.0,
)


def sized(available: int | None, config: EngineConfig, *, token_bytes: int = TOKEN_BYTES) -> Sizing:
    footprint = Footprint(
        spec=SPEC,
        sizes=config.sizes(DEFAULTS),
        weight_bytes=100 * MIB,
        kv_dtype="f16",
        kv_bytes_per_token=token_bytes,
        activation_bytes=lambda batch, context: 20 * KIB * batch + 64 * context,
        available_bytes=available,
    )
    return size_pool(footprint, config)


def activations(context: int, batch: int = 512) -> int:
    return 20 * KIB * batch + 64 * context


def size(available: int | None = None, /, **chosen: Any) -> Sizing:
    return sized(available, EngineConfig(**chosen))


def test_a_budget_in_bytes_is_filled_and_not_passed() -> None:
    sizing = size(kv_memory="100KiB")
    assert sizing.total_blocks == 6
    assert sizing.ledger.kv_pool_bytes == 96 * KIB
    assert sizing.context_tokens == 96
    (note,) = sizing.notes
    assert note == (
        "the context is limited to 96 tokens by the KV pool; the model's is 8,192 "
        "(--kv-memory 8192KiB holds it)"
    )


def test_a_budget_in_tokens_is_held() -> None:
    sizing = size(kv_tokens=100_001)
    assert sizing.total_blocks == 6251
    assert sizing.context_tokens == 8192
    assert sizing.notes == ()


def test_a_fraction_is_of_what_the_rest_leaves() -> None:
    available = FIXED + activations(8192) + 100 * MIB
    assert size(available, kv_fraction=1.0).ledger.kv_pool_bytes == 100 * MIB
    assert size(available, kv_fraction=0.25).ledger.kv_pool_bytes == 25 * MIB
    assert size(available).ledger.kv_pool_bytes == 50 * MIB  # a half, when nothing is said


def test_the_default_is_no_more_than_all_sequences_can_fill() -> None:
    plenty = 10**12
    assert size(plenty, max_sequences=3).total_blocks == 3 * 512
    assert size(plenty, max_sequences=3, context_tokens=100).total_blocks == 3 * 7
    assert size(plenty, max_sequences=3, kv_fraction=0.5).total_blocks > 10**6


def test_where_memory_is_not_known_the_default_is_one_whole_context() -> None:
    assert size().total_blocks == 512
    with pytest.raises(
        ConfigError,
        match=r"kv_fraction is 0.5, but this machine does not report how much memory.*kv_memory",
    ):
        size(kv_fraction=0.5)


def test_a_shorter_context_takes_fewer_activations() -> None:
    assert size(kv_tokens=160).ledger.activations_bytes == activations(160)
    assert size(context_tokens=64).ledger.activations_bytes == activations(64)


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"context_tokens is 9000; the model's context is 8192"):
        size(context_tokens=9000)


def refused(available: int | None, **chosen: Any) -> MemoryFitError:
    with pytest.raises(MemoryFitError) as error:
        size(available, **chosen)
    assert "KV pool" in error.value.detail
    assert "a token's KV: 2 × 8 layers × 2 KV heads × 16 × 2 bytes (f16)" in error.value.detail
    assert error.value.detail in str(error.value)
    return error.value


def test_a_context_that_the_budget_does_not_hold() -> None:
    error = refused(None, kv_memory="1MiB", context_tokens=4096)
    assert error.cause == (
        "A context of 4,096 tokens needs a KV pool of 4.0 MiB; kv_memory allows 1.0 MiB, which "
        "holds 1,024."
    )
    assert error.remedy == "Set --kv-memory 4096KiB, or --context-tokens 1024."
    assert error.param == "context_tokens"
    error = refused(FIXED + activations(8192) + 10 * MIB, context_tokens=8192)
    assert "half of the memory left allows 5.0 MiB, which holds 5,120." in error.cause
    assert error.remedy == "Set --kv-memory 8192KiB, or --context-tokens 5120."
    error = refused(None, kv_memory="1KiB")
    assert error.remedy == "Set --kv-memory 16KiB."
    assert error.param == "kv_memory"


def test_a_budget_that_memory_does_not_hold() -> None:
    available = FIXED + activations(8192) + 100 * MIB
    error = refused(available, kv_memory="1GiB")
    assert error.cause.startswith("kv_memory asks for a KV pool of 1.0 GiB; 100.0 MiB of 2")
    assert error.remedy == "Set --kv-memory 95MiB."  # free memory moves: not to the last byte
    error = refused(available, kv_tokens=10**6)
    assert error.remedy == "Set --kv-memory 95MiB in place of --kv-tokens."


def test_advice_is_in_tokens_where_a_round_size_would_miss() -> None:
    """7 blocks take 112,112 bytes, and 112,200 are left: 109 KiB are too few, 110 too many."""
    left = 112_200
    for budget in ({"kv_fraction": 0.5}, {"kv_memory": "1MiB"}):
        config = EngineConfig.from_mapping({"context_tokens": 100, **budget})
        with pytest.raises(MemoryFitError) as error:
            sized(FIXED + activations(100) + left, config, token_bytes=1001)
        assert error.value.remedy.startswith("Set --kv-tokens 112")


def test_a_model_that_does_not_fit() -> None:
    error = refused(50 * MIB)
    assert error.cause.startswith("The model does not fit: it takes 159.")
    assert error.cause.endswith("with a KV pool of 256 tokens, and 50.0 MiB are free.")
    assert re.match(r"Free 109\.\d MiB more, or choose a smaller model", error.remedy)
    error = refused(FIXED + activations(256, 128) + MIB)
    assert error.remedy == "Set --max-batch-tokens 128 --context-tokens 256 --kv-tokens 256."


def follow(error: MemoryFitError, chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings that each alternative of a remedy gives."""
    found = []
    for advice in error.remedy.removeprefix("Set ").partition(" in place")[0].split(", or "):
        flags = re.findall(r"--([a-z-]+) (\w+)", advice)
        new = {name.replace("-", "_"): value for name, value in flags}
        kept = {
            name: value
            for name, value in chosen.items()
            if not (name.startswith("kv_") and any(n.startswith("kv_") for n in new))
        }
        for name, value in new.items():
            kept[name] = value if name == "kv_memory" else int(value)
        found.append(kept)
    return found


SIZES = st.one_of(st.integers(1, 2**14), st.integers(2**14, 2**24), st.integers(2**24, 2**30))
BUDGETS = st.one_of(
    st.none(),
    st.tuples(st.just("kv_memory"), SIZES),
    st.tuples(st.just("kv_tokens"), st.integers(1, 20_000)),
    st.tuples(st.just("kv_fraction"), st.floats(1e-6, 1.0)),
)


@settings(max_examples=400)
@given(
    room=SIZES,  # beside all but the pool, at the smallest context and batch
    token_bytes=st.integers(1, 2**14),
    budget=BUDGETS,
    context=st.none() | st.integers(1, 8192),
    batch=st.integers(1, 2048),
)
def test_what_is_chosen_fits_and_what_is_advised_works(
    room: int, token_bytes: int, budget: tuple[str, Any] | None, context: int | None, batch: int
) -> None:
    available = FIXED + activations(1, 1) + room
    chosen: dict[str, Any] = {"max_batch_tokens": batch}
    if budget is not None:
        chosen[budget[0]] = budget[1]
    if context is not None:
        chosen["context_tokens"] = context
    try:
        sizing = sized(available, EngineConfig(**chosen), token_bytes=token_bytes)
    except MemoryFitError as error:
        advice = follow(error, chosen) if error.remedy.startswith("Set ") else []
        event(" ".join(re.findall(r"--[a-z-]+", error.remedy)) or "no settings would do")
        for advised in advice:
            again = sized(available, EngineConfig(**advised), token_bytes=token_bytes)
            check(again, advised, available)
    else:
        event("fits")
        check(sizing, chosen, available)


def check(sizing: Sizing, chosen: dict[str, Any], available: int) -> None:
    assert sizing.ledger.total_bytes <= available
    assert 1 <= sizing.context_tokens <= sizing.total_blocks * 16
    config = EngineConfig(**chosen)
    if config.context_tokens is not None:
        assert sizing.context_tokens == config.context_tokens
    if config.kv_memory_bytes is not None:
        assert sizing.ledger.kv_pool_bytes <= config.kv_memory_bytes
    if config.kv_tokens is not None:
        assert 0 <= sizing.total_blocks * 16 - config.kv_tokens < 16
    assert asdict(sizing.ledger)["total_blocks"] == sizing.total_blocks


def test_ranks_agree_on_the_smallest_pool() -> None:
    first, second = size(kv_tokens=4096), size(kv_tokens=2048)
    for each, alone in zip(agreed([first, second]), (first, second), strict=True):
        assert each.total_blocks == each.ledger.total_blocks == 128
        assert each.ledger.kv_pool_bytes == 2048 * TOKEN_BYTES
        assert each.context_tokens == 2048
        assert each.ledger.fixed_bytes == alone.ledger.fixed_bytes
