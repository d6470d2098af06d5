"""Attention of long chunks against dense attention in float64; without a Hopper GPU, what the
kernel says is run over torch tensors (gluon_on_cpu.py)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.cuda.gluon_on_cpu import Descriptor, Pointer, run_on_cpu
from tests.backends.cuda.test_attention import SPEC, error, reference

from headrace.backends.cuda.attention_plan import FIELDS, SPLIT, WorkShape, plan_attention
from headrace.backends.cuda.inputs import StepInputs
from headrace.backends.cuda.triton import prefill
from headrace.core.step import RunnerLimits, StepEntry
from headrace.models.spec import AttentionSpec

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
WIDE = replace(SPEC, head_dim=128, heads=8)
CASES: dict[str, tuple[AttentionSpec, list[tuple[int, int]], int]] = {
    "one tile": (WIDE, [(0, 20)], 64),
    "chunks": (WIDE, [(0, 70), (300, 1), (63, 65), (640, 33)], 64),
    "many tiles": (WIDE, [(900, 40)], 64),
    "head of 64, group of 1": (replace(SPEC, head_dim=64, heads=2), [(0, 200)], 128),
    "window": (replace(WIDE, window=150), [(500, 50), (0, 40)], 64),
    "soft cap": (replace(WIDE, softcap=1.5), [(130, 30)], 64),
}


def shape_of(spec: AttentionSpec) -> WorkShape:
    group = spec.heads // spec.kv_heads
    return WorkShape(kv_heads=spec.kv_heads, group=group, multiprocessors=16, max_sequences=8)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_agrees_with_dense_attention(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, chunks, block_tokens = CASES[name]
    assert prefill.can_prefill(spec, block_tokens, dtype)
    rng = torch.Generator().manual_seed(len(name))
    starts, counts = (np.array(column) for column in zip(*chunks, strict=True))
    rows, padding = int(counts.sum()), 2
    qkv = torch.randn(rows + padding, spec.qkv_width, generator=rng).to(dtype)
    blocks_of = -(-(starts + counts) // block_tokens)
    total_blocks = int(blocks_of.sum()) + 1
    free = torch.randperm(total_blocks, generator=rng)
    pool = torch.full((2, total_blocks, spec.kv_heads, block_tokens, spec.head_dim), math.nan)
    # No column to spare: what the kernel reads past a table is seen.
    tables = torch.full((len(starts), int(blocks_of.max())), -1, dtype=torch.int32)
    wanted, used, row = [], 0, 0
    for i, (start, count) in enumerate(chunks):
        blocks = free[used : used + blocks_of[i]]
        used += len(blocks)
        tables[i, : len(blocks)] = blocks
        new = torch.randn(2, start + count, spec.kv_heads, spec.head_dim, generator=rng)
        new = new.to(dtype).float()
        at = torch.arange(start + count)
        pool[:, blocks[at // block_tokens], :, at % block_tokens] = new.movedim(1, 0)
        q = qkv[row : row + count, : spec.q_width].reshape(-1, spec.heads, spec.head_dim)
        wanted.append(reference(q, new[0], new[1], start, spec))
        row += count

    shape = shape_of(spec)
    items = np.full((shape.capacity(rows + padding, prefill.TILE), FIELDS), -7, np.int32)
    plan_attention(starts, counts, items, shape, prefill.TILE, window=spec.window)
    out = torch.full((rows + padding, spec.q_width), math.nan, dtype=dtype, device=device)
    if HOPPER:
        kernel = prefill.PrefillKernel(spec, block_tokens)
        layer, work = pool.to(dtype).to(device), torch.from_numpy(items).to(device)
        for _ in range(2):  # the second time by Launch's short way
            kernel.launch(qkv.to(device), layer, tables.to(device), work, len(items), out)
    else:
        launch = run_on_cpu(monkeypatch, prefill, "_prefill_kernel", prefill.TILE.warps)
        lines = pool.to(dtype).view(-1, spec.head_dim)
        launch(
            len(items) * spec.kv_heads, Pointer(qkv), Descriptor(lines, prefill.PART_TOKENS),
            Pointer(tables), Pointer(torch.from_numpy(items)), Pointer(out),
            len(lines) // 2, tables.shape[1], spec.heads, spec.kv_heads, spec.head_dim,
            block_tokens, prefill.TILE.rows, prefill.PART_TOKENS, spec.scale, spec.window or 0,
            spec.softcap or 0.0,
        )  # fmt: skip
    assert error(out[:rows].double().cpu(), torch.cat(wanted)) < 1e-2
    assert out[rows:].isnan().all()


def test_whole_tiles_are_not_cut() -> None:
    shape, starts, counts = shape_of(WIDE), np.array([5000]), np.array([64])
    items = np.zeros((shape.capacity(64, prefill.TILE), FIELDS), np.int32)
    assert plan_attention(starts, counts, items, shape, prefill.TILE) == 2
    assert (items[:2, SPLIT] == 65536).all()
    assert not shape.fills_whole(starts, counts)
    assert shape.fills_whole(np.array([0]), np.array([4096]))


def test_steps_that_it_is_used_for() -> None:
    limits = RunnerLimits(
        max_batch_tokens=4096, max_sequences=8, total_blocks=1, block_tokens=64, context_tokens=8192
    )
    inputs = StepInputs(
        limits, shape_of(WIDE), head_dim=128, windows=[None], wanted_rows=8, vocab_size=10,
        device=torch.device("cpu"), can_prefill=True,
    )  # fmt: skip

    def entry(start: int, count: int) -> StepEntry:
        return StepEntry(sequence_id=start, token_ids=[0] * count, start=start, block_table=[])

    long = inputs.shape_of([entry(700, 1), entry(0, 2048)], 2049)
    assert long.whole
    assert inputs.views(long).tile is prefill.TILE
    assert not inputs.shape_of([entry(8000, 1), entry(0, 256)], 257).whole  # would wait for the one
    assert not inputs.shape_of([entry(50, 1)] * 8, 8).whole


def test_what_it_does_not_do() -> None:
    assert not prefill.can_prefill(WIDE, 32, torch.bfloat16)
    assert not prefill.can_prefill(WIDE, 64, torch.float8_e4m3fn)
    assert not prefill.can_prefill(replace(WIDE, head_dim=96), 64, torch.bfloat16)
