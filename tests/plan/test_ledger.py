"""The ledger's figures against formulas worked out by hand."""

from __future__ import annotations

import json

import pytest

from headrace.models.spec import AttentionSpec, ModelSpec, RopeSpec
from headrace.plan.ledger import Allocated, Difference, Ledger, predict


def make_spec(*, layers: int, kv_heads: int, head_dim: int, context: int = 4096) -> ModelSpec:
    attention = tuple(
        AttentionSpec(
            layer=layer,
            heads=8 * kv_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            rope=RopeSpec(inv_freq=(1.0,)),
        )
        for layer in range(layers)
    )
    return ModelSpec(
        family="test",
        vocab_size=32_000,
        hidden_size=8192,
        intermediate_size=28_672,
        context_tokens=context,
        norm_eps=1e-5,
        attention=attention,
    )


SPEC_70B = make_spec(layers=80, kv_heads=8, head_dim=128)


def ledger_70b(kv_bytes: int = 327_680, dtype: str = "f16") -> Ledger:
    return predict(
        SPEC_70B,
        weight_bytes=140 * 10**9,
        activation_bytes=2 * 10**9,
        kv_bytes_per_token=kv_bytes,
        kv_dtype=dtype,
        total_blocks=4096 * 32 // 16,
        block_tokens=16,
        max_batch_tokens=512,
        available_bytes=200 * 2**30,
    )


def test_kv_of_a_70b_model_at_4096_tokens_for_32_sequences() -> None:
    """2 x 80 x 8 x 128 x 2 bytes = 327,680 a token; 4096 x 32 of them."""
    assert SPEC_70B.kv_bytes_per_token(2) == 327_680
    ledger = ledger_70b(SPEC_70B.kv_bytes_per_token(2))
    assert ledger.kv_pool_bytes == 42_949_672_960
    assert ledger.kv_tokens == 4096 * 32
    rows = {name: count for name, count, _ in ledger.rows()}
    assert sum(rows.values()) == ledger.total_bytes
    assert rows["weights"] + rows["activations"] + rows["runtime"] == ledger.fixed_bytes
    assert rows["runtime"] > 32_000 * 500  # a vocabulary is not free


def test_the_table_spells_out_the_formula() -> None:
    lines = ledger_70b().render().splitlines()
    assert lines[-1] == (
        "a token's KV: 2 × 80 layers × 8 KV heads × 128 × 2 bytes (f16) = 327,680 bytes per token"
    )
    assert lines[1] == "KV pool        40.0 GiB   131,072 tokens in 8,192 blocks of 16"
    assert lines[4].startswith("total ")
    assert lines[4].endswith("of 200.0 GiB free")
    assert len({line.index("iB") for line in lines[:5]}) == 1  # one column


def test_scales_of_quantized_values_are_in_the_formula() -> None:
    with_scales = 2 * 80 * 8 * (128 + 2)  # int8, and a fp16 scale for each head
    assert "128 × 1.016 bytes (int8) = 166,400 bytes" in ledger_70b(with_scales, "int8").render()


def test_what_was_allocated_stands_beside() -> None:
    ledger = ledger_70b()
    allocated = Allocated(
        weights_bytes=ledger.weights_bytes * 102 // 100,
        kv_pool_bytes=ledger.kv_pool_bytes,
        activations_bytes=ledger.activations_bytes * 90 // 100,
    )
    rows = {row.name: row for row in ledger.compare(allocated)}
    assert [row.agrees for row in rows.values()] == [True, True, False, True]
    assert rows["weights"].share == pytest.approx(0.02)
    assert rows["activations"].share == pytest.approx(-0.1)
    together = ledger.total_bytes - ledger.runtime_bytes
    assert rows["together"].predicted_bytes == together
    table = ledger.render(allocated)
    assert table.splitlines()[0].split() == ["predicted", "allocated"]
    assert "+2.0%" in table
    assert "-10.0%" in table


def test_the_limit_is_five_percent() -> None:
    assert Difference("x", 100, 105).agrees
    assert not Difference("x", 1000, 1051).agrees
    assert not Difference("x", 1000, 949).agrees
    assert Difference("x", 0, 0).agrees
    assert not Difference("x", 0, 1).agrees


def test_facts_are_json() -> None:
    facts = json.loads(json.dumps(ledger_70b().facts()))
    assert facts["kv_pool_bytes"] == 42_949_672_960
    assert facts["kv"]["bytes_per_token"] == 327_680
