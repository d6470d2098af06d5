"""Counted FLOPs and bytes against formulas written by hand and against sums taken one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from headrace.models.counting import Chunk, StepCount, count_step, size_weights
from headrace.models.dims import Dims, make_spec
from headrace.models.families.hub_names import HubNames, hub_weights
from headrace.models.registry import describe_config
from headrace.models.spec import ModelSpec, RopeSpec
from headrace.weights.files.safetensors import SafetensorsFolder

DIMS = Dims(
    vocab_size=1000, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2,
    head_dim=16, context_tokens=4096, norm_eps=1e-6,
)  # fmt: skip
ROPE = RopeSpec(inv_freq=(1.0,) * 8)


def spec_of(window: int | None = None) -> ModelSpec:
    return make_spec(
        "llama", DIMS, context_tokens=4096, ropes=ROPE, windows=window, tied_embeddings=True
    )


def count(chunks: list[Chunk], window: int | None = None, bytes_per_value: float = 2) -> StepCount:
    refs = hub_weights(DIMS, HubNames("model.", "lm_head.weight"), tied=True)
    return count_step(spec_of(window), size_weights(refs, bytes_per_value), chunks)


def test_decode_reads_every_weight_once_and_the_whole_context() -> None:
    found = count([Chunk(tokens=1, start=99)])
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 96  # qkv, out, mlp
    head = 1000 * 64
    assert found.matmul_flops == 2 * (2 * layer + head)
    assert found.attention_flops == 2 * 4 * 100 * 64
    norms = 5 * 64 * 4
    assert found.weight_bytes == 2 * (2 * layer + head) + norms + 64 * 2  # and one embedding row
    assert found.kv_read_bytes == 2 * 100 * 2 * 32 * 2
    assert found.kv_written_bytes == 2 * 2 * 32 * 2


def test_activation_bytes_of_one_token() -> None:
    found = count([Chunk(tokens=1, wanted=0)])
    layer = (
        (64 + 64) + (64 + 128)  # norm, qkv
        + (96 + 96) + (128 + 64)  # rope over queries and keys, attention
        + (64 + 64) + 3 * 64  # out, add
        + (64 + 64) + (64 + 192) + (192 + 96) + (96 + 64) + 3 * 64  # norm, mlp, add
    )  # fmt: skip
    assert found.activation_bytes == 4 * (64 + 2 * layer)


def test_a_step_without_wanted_rows_has_no_head() -> None:
    scored, silent = count([Chunk(tokens=8, wanted=8)]), count([Chunk(tokens=8, wanted=0)])
    assert scored.matmul_flops - silent.matmul_flops == 2 * 8 * 1000 * 64


def test_weights_are_read_once_however_many_sequences() -> None:
    one = count([Chunk(tokens=1, start=9)])
    many = count([Chunk(tokens=1, start=9) for _ in range(16)])
    assert many.weight_bytes - one.weight_bytes == 15 * 64 * 2  # embedding rows
    assert many.flops == 16 * one.flops
    assert many.kv_read_bytes == 16 * one.kv_read_bytes


def test_fewer_bits_fewer_bytes() -> None:
    whole, quarter = count([Chunk(tokens=1)]), count([Chunk(tokens=1)], bytes_per_value=0.5)
    norms = 5 * 64 * 4
    assert whole.weight_bytes - norms == 4 * (quarter.weight_bytes - norms)


@settings(deadline=None)
@given(
    tokens=st.integers(1, 40),
    start=st.integers(0, 60),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_attention_counts_each_pair_that_is_seen(
    tokens: int, start: int, window: int | None
) -> None:
    found = count([Chunk(tokens=tokens, start=start)], window)
    seen = [
        {k for k in range(at + 1) if window is None or k > at - window}
        for at in range(start, start + tokens)
    ]
    assert found.attention_flops == 2 * 4 * 64 * sum(len(keys) for keys in seen)
    assert found.kv_read_bytes == 2 * 2 * 32 * 2 * len(set.union(*seen))


@pytest.mark.parametrize("case", ["llama2", "qwen2", "phi3", "gemma3"])
def test_flops_agree_with_torch(
    make_tiny: Callable[[str], tuple[torch.nn.Module, Path]], case: str
) -> None:
    """torch counts every product that transformers computes; attention in full, without a mask."""
    model, folder = make_tiny(case)
    with SafetensorsFolder.open(folder) as file:
        spec, refs = describe_config(file.config, file.tensors)
    n = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(n)[None])
    found = count_step(spec, size_weights(refs, 2), [Chunk(tokens=n, wanted=n)])
    squares = sum(4 * n * n * attention.q_width for attention in spec.attention)
    assert counter.get_total_flops() == found.matmul_flops + squares
