"""A decode step's rope, write to blocks and attention in one launch.

    kernel = DecodeKernel(spec, shape, block_tokens, workspace, table, q_norm=None, k_norm=None)
    kernel.launch(qkv, kv_layer, block_tables, items, capacity, tile, out)

For steps in which every sequence computes one token (items from plan_attention, a tile of 16 rows
or as many as the group needs), in place of rope.py's launch and then attention.py's. Each
program norms and rotates its queries itself; the one whose range ends at the new token also writes
the token's key and value to its block. Nobody reads those from there within the launch: that
program takes them from registers, rounded as they are stored. qkv stays as it was. Padding has no
item, so that nothing of it is written. Knows nothing of scheduling or of other layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backends.cuda.attention_plan import Tile, WorkShape
from headrace.backends.cuda.triton.attention import AttentionWorkspace
from headrace.backends.cuda.triton.attention_tiles import attend_keys, finish, tanh
from headrace.backends.cuda.triton.launch import (
    Launch,
    dependent_launch,
    let_next_start,
    wait_for_previous,
)
from headrace.backends.cuda.triton.rope import stored
from headrace.models.spec import AttentionSpec


class DecodeKernel:
    """One layer's. `kv_scale` is what stored keys and values are multiplied by when read (fp8)."""

    def __init__(
        self,
        spec: AttentionSpec,
        shape: WorkShape,
        block_tokens: int,
        workspace: AttentionWorkspace,
        table: torch.Tensor,  # rope_table's
        *,
        q_norm: torch.Tensor | None = None,  # [head_dim]
        k_norm: torch.Tensor | None = None,
        kv_scale: float = 1.0,
        dependent: bool = False,
    ) -> None:
        self._workspace = workspace
        self._table = table
        self._norms = (q_norm, k_norm) if q_norm is not None and k_norm is not None else None
        self._kv_scale = kv_scale
        self._kv_heads = shape.kv_heads
        self._head_dim = spec.head_dim
        self._options = dependent_launch(dependent)
        self._launches: dict[tuple[Tile, torch.dtype], Launch] = {}
        self._constants: dict[str, Any] = {
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "HEAD_DIM": spec.head_dim,
            "HEAD_PAD": triton.next_power_of_2(spec.head_dim),
            "HALF": len(spec.rope.inv_freq),
            "INTERLEAVED": spec.rope.interleaved,
            "NORM": self._norms is not None,
            "EPS": spec.norm_eps,
            "BLOCK_TOKENS": block_tokens,
            "SCALE": spec.scale,
            "WINDOW": spec.window or 0,
            "SOFTCAP": spec.softcap or 0.0,
            "DEPENDENT": dependent,
        }

    def launch(
        self,
        qkv: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        items: torch.Tensor,
        capacity: int,
        tile: Tile,
        out: torch.Tensor,
    ) -> None:
        launch = self._launches.get((tile, kv_layer.dtype))
        if launch is None:
            tiles = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "STAGES": tile.stages}
            options = {**self._options, "num_warps": tile.warps}
            launch = Launch(_decode_kernel, {**self._constants, **tiles}, options)
            self._launches[tile, kv_layer.dtype] = launch
        q_norm, k_norm = self._norms or (self._table, self._table)  # not read without norms
        launch(
            capacity * self._kv_heads,
            qkv,
            kv_layer,
            block_tables,
            items,
            self._table,
            q_norm,
            k_norm,
            self._workspace.sums,
            self._workspace.weights,
            self._workspace.counters,
            out,
            self._kv_scale,
            kv_layer.stride(0) // self._head_dim,
            block_tables.stride(0),
        )


@triton.jit
def _turned(
    start,  # pointers to the heads' first values: [BLOCK, 1]
    mine,  # [BLOCK, 1]
    position,
    table,
    norm,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """Heads, normed and rotated, in float32: [BLOCK, HEAD_PAD]. A value's partner in rotation is
    read a second time (it is in the nearest cache) rather than moved between threads."""
    d = tl.arange(0, HEAD_PAD)
    turns = d < 2 * HALF
    if INTERLEAVED:
        pair = d // 2
        is_first = d % 2 == 0
        partner = tl.where(turns, d + tl.where(is_first, 1, -1), d)
    else:
        pair = tl.where(d < HALF, d, d - HALF)
        is_first = d < HALF
        partner = tl.where(turns, tl.where(is_first, d + HALF, d - HALF), d)
    line = table + position.to(tl.int64) * (2 * HALF) + pair
    cos = tl.load(line, mask=turns, other=1.0)
    sin = tl.load(line + HALF, mask=turns, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    held = mine & (d < HEAD_DIM)[None, :]
    x = tl.load(start + d[None, :], mask=held, other=0.0).to(tl.float32)
    y = tl.load(start + partner[None, :], mask=held, other=0.0).to(tl.float32)
    if NORM:
        inverse = (1 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + EPS))[:, None]
        x *= inverse * tl.load(norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        y *= inverse * tl.load(norm + partner, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def _add_token(total, best, weight, q, k, v, score_scale, SOFTCAP: tl.constexpr):
    """One more key [1, HEAD_PAD] and its value, that every row sees."""
    score = tl.sum(q.to(tl.float32) * k, 1) * score_scale
    if SOFTCAP > 0:
        score = tanh(score) * (SOFTCAP * 1.4426950408889634)
    new_best = tl.maximum(best, score)
    p = tl.exp2(score - new_best)
    shrink = tl.exp2(best - new_best)
    return total * shrink[:, None] + p[:, None] * v, new_best, weight * shrink + p


@triton.jit
def _decode_kernel(
    qkv,  # [rows, qkv_width]
    kv,  # [2, total_blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM]
    tables,  # [sequences, table_stride]
    items,  # [capacity, 8]
    rope,  # [context, 2 * HALF]
    q_norm,
    k_norm,
    sums,
    weights,
    counters,
    out,  # [rows, HEADS * HEAD_DIM]
    kv_scale,
    value_lines,  # from a key's line of HEAD_DIM values to its value's
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KIND: tl.constexpr = kv.dtype.element_ty
    DOT_TYPE: tl.constexpr = KIND if KIND.primitive_bitwidth > 8 else tl.float16
    program = tl.program_id(0)
    head = program % KV_HEADS
    item = items + (program // KV_HEADS) * 8
    if tl.load(item + 1) == 0:
        return
    row = tl.load(item).to(tl.int64)
    position = tl.load(item + 2)
    table = tables + tl.load(item + 3).to(tl.int64) * table_stride
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    partial = tl.load(item + 6)
    split = tl.load(item + 7)
    if SOFTCAP > 0:
        score_scale = kv_scale * (SCALE / SOFTCAP)
    else:
        score_scale = kv_scale * (SCALE * 1.4426950408889634)
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)

    line = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    r = tl.arange(0, BLOCK_M)
    mine = (r < GROUP)[:, None]
    start = line + (head * GROUP + r)[:, None] * HEAD_DIM
    q = _turned(
        start, mine, position, rope, q_norm, HEAD_DIM, HEAD_PAD, HALF, INTERLEAVED, NORM, EPS
    ).to(DOT_TYPE)
    total = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    best = tl.full([BLOCK_M], -1.0e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    known = tl.minimum(end, position)  # keys that were in blocks before this step
    total, best, weight = attend_keys(
        total, best, weight, q, position + r * 0, kv, value_lines, table, head,
        begin, known, known, score_scale, True, False, KV_HEADS, HEAD_DIM, HEAD_PAD,
        BLOCK_TOKENS, BLOCK_N, WINDOW, SOFTCAP, DOT_TYPE, STAGES,
    )  # fmt: skip
    if end > position:
        d = tl.arange(0, HEAD_PAD)[None, :]
        one = tl.arange(0, 1)[:, None]
        held = d < HEAD_DIM
        k = _turned(
            line + (HEADS + head + one) * HEAD_DIM, one == 0, position, rope, k_norm,
            HEAD_DIM, HEAD_PAD, HALF, INTERLEAVED, NORM, EPS,
        )  # fmt: skip
        v = tl.load(line + (HEADS + KV_HEADS + head + one) * HEAD_DIM + d, mask=held, other=0.0)
        k = stored(k, 1 / kv_scale, KIND)
        v = stored(v.to(tl.float32), 1 / kv_scale, KIND)
        block = tl.load(table + position // BLOCK_TOKENS).to(tl.int64)
        place = (block * KV_HEADS + head) * BLOCK_TOKENS + position % BLOCK_TOKENS
        tl.store(kv + place * HEAD_DIM + d, k, mask=held)
        tl.store(kv + (place + value_lines) * HEAD_DIM + d, v, mask=held)
        total, best, weight = _add_token(
            total, best, weight, q, k.to(tl.float32), v.to(tl.float32), score_scale, SOFTCAP
        )
    columns = (head * GROUP + r)[:, None] * HEAD_DIM + tl.arange(0, HEAD_PAD)[None, :]
    finish(
        total, best, weight, out + row * (HEADS * HEAD_DIM) + columns, GROUP, partial,
        split % 65536, split // 65536, head, kv_scale, sums, weights, counters,
        KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_M,
    )  # fmt: skip
