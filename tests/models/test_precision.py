"""Weight bytes by precision: worked examples from elsewhere, published file sizes, the gguf
package's block sizes, and division among ranks."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.models.formats import BF16, FP8, GGUF, INT4_32
from headrace.models.known import Known, all_known, find_known
from headrace.models.matrices import Part
from headrace.models.precision import (
    PRECISIONS,
    Precision,
    WeightBytes,
    find_precision,
    tp_obstacle,
    weight_bytes,
)

EVERYWHERE = tuple(Part)


def gigabytes(name: str, precision: Precision | str) -> float:
    chosen = PRECISIONS[precision] if isinstance(precision, str) else precision
    return weight_bytes(find_known(name).spec, chosen).total / 1e9


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("llama-3-70b", "fp16", 141.1),
        ("llama-3-70b", "int4", 40.6),
        ("llama-3-70b", "fp8", 72.7),
        ("llama-3.1-405b", "bf16", 811.7),
        ("mixtral-8x7b", "fp16", 93.4),
        ("qwen2-72b", "fp16", 145.4),
        # The published checkpoints: 12.8 and 60.8 GiB by the model card of gpt-oss.
        ("gpt-oss-20b", "mxfp4", 13.8),
        ("gpt-oss-120b", "mxfp4", 65.2),
    ],
)
def test_worked_examples(name: str, precision: str, expected: float) -> None:
    assert round(gigabytes(name, precision), 1) == expected


def test_405b_with_every_value_quantized() -> None:
    """405.9 and 228 GB count the embeddings in 8 and 4.5 bits too; as quantizers leave them in
    bf16, it is 410.1 GB in FP8."""
    fp8 = Precision(name="all", formats=dict.fromkeys(EVERYWHERE, FP8))
    int4 = Precision(name="all", formats=dict.fromkeys(EVERYWHERE, INT4_32))
    assert round(gigabytes("llama-3.1-405b", fp8), 1) == 405.9
    assert round(gigabytes("llama-3.1-405b", int4)) == 228
    assert round(gigabytes("llama-3.1-405b", "fp8"), 1) == 410.1


@pytest.mark.parametrize(
    ("mixture", "bits"),
    [
        ("q2_k", 3.1593), ("q3_k_s", 3.6429), ("q3_k_l", 4.2979), ("q4_k_s", 4.6672),
        ("q4_k_m", 4.8944), ("q5_k_s", 5.5704), ("q5_k_m", 5.7036), ("q6_k", 6.5633),
        ("q8_0", 8.5008), ("iq4_xs", 4.4597),
    ],
)  # fmt: skip
def test_gguf_mixtures_of_llama_3_1_8b(mixture: str, bits: float) -> None:
    """Bits a weight as llama.cpp's quantizer prints them (tools/quantize/README.md)."""
    parameters = find_known("llama-3.1-8b").spec.parameters
    assert gigabytes("llama-3.1-8b", mixture) * 8e9 / parameters == pytest.approx(bits, abs=2e-4)


@pytest.mark.parametrize("name", sorted(GGUF))
def test_gguf_types_are_as_large_as_the_gguf_package_has_them(name: str) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    form = GGUF[name]
    assert form.value_bytes(3, 4 * block) + form.scale_bytes(3, 4 * block) == 3 * 4 * size


def test_what_stays_unquantized() -> None:
    spec = find_known("llama-3-8b").spec
    table = 128_256 * 4096 * 2
    for name in ("fp8", "int8", "int4", "awq", "gptq", "nvfp4"):
        found = weight_bytes(spec, PRECISIONS[name])
        assert found.embedding == found.output == table
        assert found.norms == 65 * 4096 * 2
        assert found.scales > 0
    moe = weight_bytes(find_known("gpt-oss-20b").spec, PRECISIONS["mxfp4"])
    assert moe.experts == 24 * 32 * 3 * 2880 * 2880 / 2
    assert moe.scales == moe.experts * 2 / 32
    assert moe.attention == 24 * 2 * (5120 + 4096) * 2880
    assert moe.router == 24 * 32 * 2880 * 2


def test_awq_and_gptq_differ_by_the_order_of_columns() -> None:
    spec = find_known("llama-3-8b").spec
    awq, gptq = (weight_bytes(spec, PRECISIONS[name]) for name in ("awq", "gptq"))
    assert gptq.scales - awq.scales == 32 * 4 * (6 * 4096 + 14_336)


def test_unquantized_precisions_weigh_their_parameters() -> None:
    for known in all_known():
        for name, size in (("bf16", 2), ("fp32", 4)):
            assert weight_bytes(known.spec, PRECISIONS[name]).total == size * known.spec.parameters


def test_known_checkpoints_have_a_known_precision() -> None:
    for known in all_known():
        assert weight_bytes(known.spec, PRECISIONS[known.precision]).total > 0


@settings(max_examples=150, deadline=None)
@given(
    known=st.sampled_from(all_known()),
    precision=st.sampled_from(list(PRECISIONS.values())),
    tp=st.integers(2, 40),
)
def test_ranks_hold_the_model_between_them(known: Known, precision: Precision, tp: int) -> None:
    """A rank holds at least its share, and at most all; or the error names ranks that work."""
    spec = known.spec
    if tp_obstacle(spec, precision, tp) is None:
        whole, rank = weight_bytes(spec, precision), weight_bytes(spec, precision, tp=tp)
        for field in fields(WeightBytes):
            all_of_it, part = getattr(whole, field.name), getattr(rank, field.name)
            assert all_of_it / tp <= part * (1 + 1e-9)
            assert part <= all_of_it
        return
    with pytest.raises(ConfigError) as raised:
        weight_bytes(spec, precision, tp=tp)
    nearest = [int(word) for word in raised.value.remedy.rstrip(".").split() if word.isdigit()]
    assert nearest
    for number in nearest:
        weight_bytes(spec, precision, tp=number)


def test_key_value_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    spec = find_known("llama-3-70b").spec
    eight, sixteen = (weight_bytes(spec, PRECISIONS["bf16"], tp=tp).attention for tp in (8, 16))
    keys_and_values = 80 * 2 * 128 * 8192 * 2  # of one head
    assert sixteen - keys_and_values == (eight - keys_and_values) / 2


@pytest.mark.parametrize(
    ("name", "precision", "tp", "message"),
    [
        ("llama-3-70b", "bf16", 3, r"64 attention heads.*Use 2 or 4"),
        ("qwen3-30b-a3b", "fp8-block", 8, r"768 values of an expert's width.*groups of 128.*Use 2"),
        ("qwen2.5-0.5b", "bf16", 4, r"14 attention heads.*Use 2"),
        ("llama-3-8b", "bf16", 0, r"1 to 1024 ranks"),
    ],
)
def test_what_does_not_divide_is_said(name: str, precision: str, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weight_bytes(find_known(name).spec, PRECISIONS[precision], tp=tp)


def test_precisions_by_name() -> None:
    assert find_precision(" Q4-K-M ") is PRECISIONS["q4_k_m"]
    with pytest.raises(ConfigError, match=r"'int3'.*bf16.*awq"):
        find_precision("int3")


def test_plain_format_can_be_chosen() -> None:
    spec = find_known("llama-3-8b").spec
    same = replace(PRECISIONS["fp16"], plain=BF16)
    assert weight_bytes(spec, same) == weight_bytes(spec, PRECISIONS["bf16"])
