"""Head norms, rotation and the write to blocks against the reference backend's own operations."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.plans import Row, plan_of

from headrace.backends.cuda.attention.rope import RopeKernel, rope_table
from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight
from headrace.models.spec import AttentionSpec, ModelSpec, RopeSpec

HALVES = RopeSpec(inv_freq=tuple(10000.0 ** (-i / 16) for i in range(16)))
SPEC = AttentionSpec(layer=0, heads=4, kv_heads=2, head_dim=32, scale=1.0, rope=HALVES)
SPECS = {
    "halves": SPEC,
    "interleaved": replace(SPEC, rope=replace(HALVES, interleaved=True)),
    "partial": replace(SPEC, head_dim=48),
    "partial, interleaved, group of 3": replace(
        SPEC, heads=6, head_dim=80, rope=replace(HALVES, interleaved=True)
    ),
    "scaled, group of 1": replace(SPEC, heads=2, rope=replace(HALVES, scale=1.2)),
    "odd dimensions": replace(
        SPEC, heads=5, kv_heads=1, head_dim=28, rope=RopeSpec(inv_freq=(1.0, 0.3, 0.1, 0.04, 0.01))
    ),
}
CHUNKS = [(0, 3), (131000, 2), (17, 1)]
BLOCK_TOKENS = 16
PADDING = 2


def reference(
    spec: AttentionSpec, qkv: NDArray[np.float32], norms: list[NDArray[np.float32]] | None
) -> NDArray[np.float32]:
    model = ModelSpec(
        family="test",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        context_tokens=1,
        norm_eps=1e-6,
        attention=(spec,),
    )
    entries = [
        Row(sequence_id=i, token_ids=[0] * count, start=start, block_table=[])
        for i, (start, count) in enumerate(CHUNKS)
    ]
    ops = ReferenceOps(KvBlocks(model, 1, BLOCK_TOKENS), plan_of(*entries))
    if norms is not None:
        qkv = ops.head_norm(qkv, ReferenceWeight(norms[0]), ReferenceWeight(norms[1]), spec)
    return ops.rope(qkv, spec)


WHOLE = (torch.float32, torch.float32, 1e-6, 1e-6)
HALF = (torch.bfloat16, torch.bfloat16, 6e-3, 6e-3)
BYTE = (torch.bfloat16, torch.float8_e4m3fn, 6e-3, 4e-2)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance", "kv_tolerance", "name", "normed"),
    [
        *((*WHOLE, name, normed) for name in SPECS for normed in (False, True)),
        *((*types, name, True) for name in ("halves", "partial") for types in (HALF, BYTE)),
    ],
)
def test_agrees_with_the_reference(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tolerance: float,
    kv_tolerance: float,
    name: str,
    normed: bool,
    device: torch.device,
) -> None:
    spec = SPECS[name]
    rng = torch.Generator().manual_seed(len(name))
    rows = sum(count for _, count in CHUNKS)
    qkv = torch.randn(rows + PADDING, spec.qkv_width, generator=rng).to(dtype)
    norms = [torch.rand(spec.head_dim, generator=rng).to(dtype) + 0.5 for _ in "qk"]
    wanted = reference(
        spec, qkv[:rows].float().numpy(), [w.float().numpy() for w in norms] if normed else None
    )
    total_blocks, kv_scale = 3, 0.5 if kv_dtype is torch.float8_e4m3fn else 1.0
    slots = torch.randperm(total_blocks * BLOCK_TOKENS, generator=rng)[: rows + PADDING]
    slots[rows:] = -1
    positions = [start + i for start, count in CHUNKS for i in range(count)] + [10**8] * PADDING
    poison = torch.full(
        (2, total_blocks, spec.kv_heads, BLOCK_TOKENS, spec.head_dim), 3.0, device=device
    )
    kv = poison.to(kv_dtype)
    got = qkv.to(device)
    weights = [w.to(device) for w in norms] if normed else [None, None]
    kernel = RopeKernel(
        spec,
        BLOCK_TOKENS,
        cached_table(spec.rope, device),
        q_norm=weights[0],
        k_norm=weights[1],
        kv_scale=kv_scale,
    )
    at = torch.tensor(positions, dtype=torch.int32, device=device)
    kernel.launch(got, kv, at, slots.to(device), rows + PADDING)

    queries = got[:rows, : spec.q_width].double().cpu()
    expected = torch.from_numpy(wanted).double()
    assert error(queries, expected[:, : spec.q_width]) < tolerance
    assert torch.equal(got[:, spec.q_width :].cpu(), qkv[:, spec.q_width :])
    assert torch.equal(got[rows:].cpu(), qkv[rows:])
    blocks, offsets = slots[:rows] // BLOCK_TOKENS, slots[:rows] % BLOCK_TOKENS
    stored = kv.cpu().float()[:, blocks, :, offsets].double() * kv_scale  # [rows, 2, kv_heads, d]
    assert error(stored.movedim(1, 0).reshape(2, rows, -1), split(expected, spec)) < kv_tolerance
    untouched = torch.ones(total_blocks, BLOCK_TOKENS, dtype=torch.bool)
    untouched[blocks, offsets] = False
    assert (kv.cpu().float().transpose(2, 3)[:, untouched] == 3.0).all()


@cache
def cached_table(rope: RopeSpec, device: torch.device) -> torch.Tensor:
    return rope_table(rope, 131072, device)


def split(qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Keys and values: [2, rows, kv_width]"""
    return qkv[:, spec.q_width :].reshape(len(qkv), 2, -1).movedim(1, 0)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).norm() / wanted.norm())


def test_values_too_large_for_fp8_are_held_at_its_largest(device: torch.device) -> None:
    kv = torch.zeros((2, 1, 2, 16, 32), device=device).to(torch.float8_e4m3fn)
    qkv = torch.full((1, SPEC.qkv_width), -1e6, dtype=torch.bfloat16, device=device)
    kernel = RopeKernel(SPEC, 16, rope_table(HALVES, 1, device))
    at = torch.zeros(1, dtype=torch.int32, device=device)
    kernel.launch(qkv, kv, at, at.long() + 5, 1)
    assert (kv[:, 0, :, 5].float() == -448).all()


def test_table_is_exact_far_out() -> None:
    table = rope_table(HALVES, 20000, torch.device("cpu"))
    for position in (0, 1, 8191, 8192, 19999):
        angle = float(np.float32(position) * np.float32(HALVES.inv_freq[1]))
        assert table[position, 1] == np.float32(math.cos(angle))
        assert table[position, 16 + 1] == np.float32(math.sin(angle))
