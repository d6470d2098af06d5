"""Rope, write to blocks and attention in one launch, against the reference backend's operations."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from headrace.backends.cuda.attention_plan import FIELDS, Tile, WorkShape, plan_attention
from headrace.backends.cuda.triton.attention import AttentionWorkspace
from headrace.backends.cuda.triton.decode import DecodeKernel
from headrace.backends.cuda.triton.rope import rope_table
from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight
from headrace.core.step import StepEntry
from headrace.models.spec import AttentionSpec, ModelSpec, RopeSpec

BLOCK_TOKENS = 16
HALVES = RopeSpec(inv_freq=tuple(10000.0 ** (-i / 16) for i in range(16)))
SPEC = AttentionSpec(layer=0, heads=4, kv_heads=2, head_dim=32, scale=0.3, rope=HALVES)
INTERLEAVED = replace(HALVES, interleaved=True, scale=1.1)
SPECS = {
    "halves": SPEC,
    "interleaved, partial, group of 3": replace(SPEC, heads=6, head_dim=48, rope=INTERLEAVED),
    "partial, group of 1": replace(SPEC, heads=2, head_dim=80),
    "window": replace(SPEC, window=20, rope=INTERLEAVED),
    "soft cap": replace(SPEC, softcap=1.5, heads=14),
}
LENGTHS = [300, 1, 17, 16, 33]  # of the sequences, the new token counted


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).norm() / wanted.norm())


def histories(
    spec: AttentionSpec, rng: torch.Generator
) -> tuple[torch.Tensor, list[list[int]], list[tuple[int, int]]]:
    """A pool that is NaN but for what came before, each sequence's blocks, and where its new token
    belongs: (block, offset)."""
    counts = [-(-length // BLOCK_TOKENS) for length in LENGTHS]
    total = sum(counts) + 2
    free = torch.randperm(total, generator=rng)
    order = [free[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
    pool = torch.full((2, total, spec.kv_heads, BLOCK_TOKENS, spec.head_dim), math.nan)
    places = []
    for blocks, length in zip(order, LENGTHS, strict=True):
        for at in range(length - 1):
            held = torch.randn(2, spec.kv_heads, spec.head_dim, generator=rng)
            pool[:, blocks[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS] = held
        last = length - 1
        places.append((int(blocks[last // BLOCK_TOKENS]), last % BLOCK_TOKENS))
    return pool, [blocks.tolist() for blocks in order], places


def reference(
    spec: AttentionSpec,
    qkv: torch.Tensor,
    pool: torch.Tensor,
    tables: list[list[int]],
    norms: list[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers, and the pool afterwards."""
    model = ModelSpec(
        family="test",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        context_tokens=1,
        norm_eps=1e-6,
        attention=(spec,),
    )
    blocks = KvBlocks(model, pool.shape[1], BLOCK_TOKENS)
    blocks.layers[0][:] = pool.transpose(2, 3).numpy()
    entries = [
        StepEntry(sequence_id=i, token_ids=[0], start=length - 1, block_table=table)
        for i, (length, table) in enumerate(zip(LENGTHS, tables, strict=True))
    ]
    ops = ReferenceOps(blocks, entries)
    x = qkv.numpy()
    if norms is not None:
        q_weight, k_weight = (ReferenceWeight(w.numpy()) for w in norms)
        x = ops.head_norm(x, q_weight, k_weight, spec)
    out = ops.attention(ops.rope(x, spec), spec)
    return torch.from_numpy(out).double(), torch.from_numpy(blocks.layers[0]).transpose(2, 3)


@pytest.mark.parametrize(
    ("name", "normed", "dtype", "kv_dtype", "tolerance"),
    [
        ("halves", False, torch.float32, torch.float32, 1e-5),
        *((name, True, torch.float32, torch.float32, 1e-5)
          for name in SPECS),
        ("halves", True, torch.bfloat16, torch.bfloat16, 1e-2),
        ("halves", True, torch.bfloat16, torch.float8_e4m3fn, 5e-2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("multiprocessors", [1, 16])
def test_agrees_with_the_reference(
    name: str,
    normed: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tolerance: float,
    multiprocessors: int,
    device: torch.device,
) -> None:
    spec, tile, rows, padding = SPECS[name], Tile(rows=16, keys=16), len(LENGTHS), 2
    rng = torch.Generator().manual_seed(multiprocessors + len(name))
    qkv = torch.randn(rows + padding, spec.qkv_width, generator=rng).to(dtype)
    norms = [torch.rand(spec.head_dim, generator=rng) + 0.5 for _ in "qk"] if normed else None
    kv_scale = 0.5 if kv_dtype is torch.float8_e4m3fn else 1.0
    pool, blocks, places = histories(spec, rng)
    pool = (pool / kv_scale).to(kv_dtype).float()  # what the pool can hold, for both
    wanted, wanted_pool = reference(spec, qkv[:rows].float(), pool * kv_scale, blocks, norms)

    shape = WorkShape(
        kv_heads=spec.kv_heads,
        group=spec.heads // spec.kv_heads,
        multiprocessors=multiprocessors,
        max_sequences=8,
    )
    workspace = AttentionWorkspace(shape, spec.head_dim, device)
    workspace.sums.fill_(math.nan)
    workspace.weights.fill_(math.nan)
    items = np.full((shape.capacity(rows + padding, tile), FIELDS), -7, np.int32)
    starts = np.array(LENGTHS) - 1
    found = plan_attention(starts, np.ones(rows, int), items, shape, tile, window=spec.window)
    assert (found > rows) == (multiprocessors > 1)
    tables = torch.full((rows, 24), -1, dtype=torch.int32)
    for i, table in enumerate(blocks):
        tables[i, : len(table)] = torch.tensor(table)
    q_norm, k_norm = [w.to(device) for w in norms] if norms else (None, None)
    kernel = DecodeKernel(
        spec,
        shape,
        BLOCK_TOKENS,
        workspace,
        rope_table(spec.rope, 301, device),
        q_norm=q_norm,
        k_norm=k_norm,
        kv_scale=kv_scale,
    )
    kv = pool.to(kv_dtype).to(device)
    out = torch.full((rows + padding, spec.q_width), math.nan, dtype=dtype, device=device)
    work = torch.from_numpy(items).to(device)
    kernel.launch(qkv.to(device), kv, tables.to(device), work, len(items), tile, out)

    assert error(out[:rows].double().cpu(), wanted) < tolerance
    assert out[rows:].isnan().all()
    assert workspace.counters.count_nonzero() == 0
    after = kv.float().cpu()
    at = tuple(torch.tensor(places).T)
    new = after[:, at[0], :, at[1]] * kv_scale
    assert error(new, wanted_pool[:, at[0], :, at[1]]) < tolerance
    after[:, at[0], :, at[1]] = pool[:, at[0], :, at[1]]
    assert torch.equal(after.nan_to_num(nan=7.0), pool.nan_to_num(nan=7.0))  # nothing else changed
