"""Attention over blocks against dense attention in float64, over odd shapes and mixes of chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from headrace.backends.cuda.attention.kernel import AttentionKernel, AttentionWorkspace
from headrace.backends.cuda.attention.plan import FIELDS, Tile, WorkShape, plan_attention
from headrace.models.spec import AttentionSpec, RopeSpec

SPEC = AttentionSpec(
    layer=0, heads=4, kv_heads=2, head_dim=32, scale=0.2, rope=RopeSpec(inv_freq=(1.0,))
)


SMALL = Tile(rows=16, keys=16)


@dataclass(frozen=True)
class Case:
    chunks: list[tuple[int, int]]  # (start, count) of each sequence
    spec: AttentionSpec = SPEC
    tile: Tile = SMALL
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    kv_scale: float = 1.0
    multiprocessors: int = 4


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, spec: AttentionSpec
) -> torch.Tensor:
    """[n, heads, d] against [m, kv_heads, d] -> [n, heads * d], in float64."""
    group = spec.heads // spec.kv_heads
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    at = torch.arange(start, start + len(q))[:, None]
    seen = torch.arange(len(keys))[None, :]
    hidden = seen > at
    if spec.window is not None:
        hidden |= seen <= at - spec.window
    scores = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", scores, values).reshape(len(q), -1)


def run(case: Case, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What the kernel gives, what it should, and how many items there were."""
    spec = case.spec
    rng = torch.Generator().manual_seed(seed)
    starts = np.array([start for start, _ in case.chunks])
    counts = np.array([count for _, count in case.chunks])
    rows, padding = int(counts.sum()), 3
    qkv = torch.randn(rows + padding, spec.qkv_width, generator=rng).to(case.dtype)
    lengths = starts + counts
    blocks_of = -(-lengths // case.block_tokens)
    total_blocks = int(blocks_of.sum()) + 2
    free = torch.randperm(total_blocks, generator=rng)
    kv = torch.full((2, total_blocks, spec.kv_heads, case.block_tokens, spec.head_dim), math.nan)
    tables = torch.full((len(starts), int(blocks_of.max()) + 1), -1, dtype=torch.int32)
    wanted, at, row = [], 0, 0
    for i, length in enumerate(lengths):
        blocks = free[at : at + blocks_of[i]]
        at += int(blocks_of[i])
        tables[i, : len(blocks)] = blocks
        # Stored as the pool's type says, so that only the kernel's own error is seen.
        new = torch.randn(2, int(length), spec.kv_heads, spec.head_dim, generator=rng)
        new = (new / case.kv_scale).to(case.kv_dtype).float()
        where = torch.arange(int(length))
        kv[:, blocks[where // case.block_tokens], :, where % case.block_tokens] = new.movedim(1, 0)
        new = new * case.kv_scale
        q = qkv[row : row + counts[i], : spec.q_width].reshape(-1, spec.heads, spec.head_dim)
        wanted.append(reference(q, new[0], new[1], int(starts[i]), spec))
        row += int(counts[i])

    shape = WorkShape(
        kv_heads=spec.kv_heads,
        group=spec.heads // spec.kv_heads,
        multiprocessors=case.multiprocessors,
        max_sequences=8,
    )
    workspace = AttentionWorkspace(shape, spec.head_dim, device)
    workspace.sums.fill_(math.nan)
    workspace.weights.fill_(math.nan)
    capacity = shape.capacity(rows + padding, case.tile)
    items = np.full((capacity, FIELDS), -7, np.int32)
    found = plan_attention(starts, counts, items, shape, case.tile, window=spec.window)
    kernel = AttentionKernel(
        spec, shape, case.block_tokens, workspace, kv_scale=case.kv_scale, prefetch=found % 2 == 0
    )
    out = torch.full((rows + padding, spec.q_width), math.nan, dtype=case.dtype, device=device)
    pool = kv.to(case.kv_dtype).to(device)
    work = torch.from_numpy(items).to(device)
    for _ in range(2 if found > len(starts) else 1):  # again: counters must be as they were
        kernel.launch(qkv.to(device), pool, tables.to(device), work, capacity, case.tile, out)
    assert workspace.counters.count_nonzero() == 0
    assert out[rows:].isnan().all()  # nothing writes to padding
    return out[:rows].double().cpu(), torch.cat(wanted), found


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


WIDE = Tile(rows=64, keys=16)
MIX = [(0, 37), (50, 1), (20, 5), (0, 1), (15, 1), (31, 33)]

CASES = {
    "one token": Case([(0, 1)]),
    "decode": Case([(40, 1), (0, 1), (15, 1), (16, 1), (100, 1)], multiprocessors=1),
    "decode, cut": Case([(300, 1), (17, 1)]),
    "long alone": Case([(1000, 1)], tile=Tile(rows=16, keys=32), multiprocessors=16),
    "mixed, small tile": Case(MIX),
    "mixed, large tile": Case(MIX, tile=WIDE),
    "chunk, cut": Case([(500, 20)], tile=WIDE, multiprocessors=16),
    "prefill": Case([(0, 150)], tile=Tile(rows=128, keys=32), block_tokens=32),
    "keys within a block": Case(MIX, tile=Tile(rows=64, keys=16), block_tokens=64),
    "by descriptor": Case(
        MIX, tile=Tile(rows=64, keys=16, descriptor=True), block_tokens=32, dtype=torch.float32
    ),
    "by descriptor, head of 80, cut": Case(
        [(300, 1), (7, 2)],
        replace(SPEC, head_dim=80),
        tile=Tile(rows=16, keys=16, descriptor=True),
    ),
    "window": Case(MIX, replace(SPEC, window=13), tile=WIDE),
    "window, small tile": Case(MIX, replace(SPEC, window=13)),
    "window, long, cut": Case([(700, 1), (400, 3)], replace(SPEC, window=300), multiprocessors=16),
    "window, large tile, long": Case([(100, 70)], replace(SPEC, window=64), tile=WIDE),
    "window of one": Case([(20, 6)], replace(SPEC, window=1), tile=WIDE),
    "soft cap": Case(MIX, replace(SPEC, softcap=2.0), tile=WIDE),
    "soft cap, window, cut": Case([(600, 2)], replace(SPEC, softcap=1.5, window=500)),
    "group of 1": Case(MIX, replace(SPEC, heads=2)),
    "group of 3": Case(MIX, replace(SPEC, heads=3, kv_heads=1), tile=WIDE),
    "group of 5": Case(MIX, replace(SPEC, heads=5, kv_heads=1)),
    "group of 7": Case(MIX, replace(SPEC, heads=14), tile=WIDE),
    "group of 8": Case([(200, 2)], replace(SPEC, heads=8, kv_heads=1)),
    "head of 80": Case(MIX, replace(SPEC, head_dim=80), tile=WIDE),
    "head of 96, cut": Case([(300, 1)], replace(SPEC, head_dim=96)),
    "head of 256": Case([(60, 9), (0, 3)], replace(SPEC, head_dim=256), tile=WIDE),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_dense_attention(name: str, device: torch.device) -> None:
    case = CASES[name]
    got, wanted, items = run(case, device)
    assert error(got, wanted) < 1e-5
    if "cut" in name:  # or the case would not test what it says
        tile_tokens = case.tile.rows // (case.spec.heads // case.spec.kv_heads)
        assert items > sum(-(-count // tile_tokens) for _, count in case.chunks)


@pytest.mark.parametrize("tile", [SMALL, WIDE, Tile(rows=128, keys=64, descriptor=True)])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_types_of_keys_and_values(kv_dtype: torch.dtype, tile: Tile, device: torch.device) -> None:
    case = Case(
        [(250, 1), (0, 20), (3, 2)],
        tile=tile,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        kv_scale=0.5 if kv_dtype is torch.float8_e4m3fn else 1.0,
    )
    got, wanted, _ = run(case, device)
    assert error(got, wanted) < 1e-2
