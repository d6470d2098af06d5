"""Between the qkv product and attention, one launch: head norms, rotation, and the write to blocks.

    table = rope_table(spec.rope, context_tokens, device)     # one for each distinct RopeSpec
    kernel = RopeKernel(spec, block_tokens, table, q_norm=None, k_norm=None)    # one per layer
    kernel.launch(qkv, kv_layer, positions, slots, rows)

Queries are normed (if the model does) and rotated in place in qkv [rows, qkv_width]. Keys, treated
the same way, and values are written to kv_layer [2, total_blocks, kv_heads, block_tokens, head_dim]
at their slots. A row with slot -1 is padding: nothing of it is read or written. Keys and values in
qkv are not changed. Knows nothing of sequences or of attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.backends.cuda.launch import (
    Launch,
    dependent_launch,
    let_next_start,
    wait_for_previous,
)
from headrace.models.spec import AttentionSpec, RopeSpec

_MANY_ROWS = 1024  # from here on programs of one warp are faster (measured on an H200)
_POSITIONS_AT_ONCE = 8192  # in float64 on the host


def rope_table(rope: RopeSpec, context_tokens: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of every position: [context_tokens, 2 * len(inv_freq)] float32.

    Angles are rounded to float32, and sines and cosines computed in float64 on the host, as in the
    reference: a GPU's own sine of an angle of 100,000 is not what models were trained with.
    """
    half = len(rope.inv_freq)
    table = torch.empty((context_tokens, 2 * half), dtype=torch.float32, device=device)
    frequencies = np.array(rope.inv_freq, np.float32)
    for first in range(0, context_tokens, _POSITIONS_AT_ONCE):
        positions = np.arange(first, min(first + _POSITIONS_AT_ONCE, context_tokens))
        angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
        turns = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.scale
        table[first : first + len(positions)] = torch.from_numpy(turns.astype(np.float32))
    return table


class RopeKernel:
    """One layer's kernel. Stored keys and values are multiplied by `kv_scale` when read (fp8)."""

    def __init__(
        self,
        spec: AttentionSpec,
        block_tokens: int,
        table: torch.Tensor,
        *,
        q_norm: torch.Tensor | None = None,  # [head_dim]
        k_norm: torch.Tensor | None = None,
        kv_scale: float = 1.0,
        dependent: bool = False,
        warps: int | None = None,
    ) -> None:
        self._table = table
        self._norms = (q_norm, k_norm) if q_norm is not None and k_norm is not None else None
        self._unscale = 1.0 / kv_scale
        self._kv_heads = spec.kv_heads
        group_pad = triton.next_power_of_2(spec.heads // spec.kv_heads + 1)
        half = len(spec.rope.inv_freq)
        rest = spec.head_dim - 2 * half
        values = group_pad * triton.next_power_of_2(spec.head_dim)
        constants: dict[str, Any] = {
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "HEAD_DIM": spec.head_dim,
            "HEAD_PAD": triton.next_power_of_2(spec.head_dim),
            "GROUP_PAD": group_pad,
            "HALF": half,
            "HALF_PAD": triton.next_power_of_2(half),
            "REST_PAD": triton.next_power_of_2(rest) if rest else 0,
            "INTERLEAVED": spec.rope.interleaved,
            "NORM": self._norms is not None,
            "EPS": spec.norm_eps,
            "BLOCK_TOKENS": block_tokens,
            "DEPENDENT": dependent,
        }
        most = warps or max(1, min(4, values // 512))
        self._few, self._many = (
            Launch(_rope_kernel, constants, {"num_warps": n, **dependent_launch(dependent)})
            for n in (most, warps or 1)
        )

    def launch(
        self,
        qkv: torch.Tensor,
        kv_layer: torch.Tensor,
        positions: torch.Tensor,  # int32
        slots: torch.Tensor,  # int64
        rows: int,
    ) -> None:
        q_norm, k_norm = self._norms or (self._table, self._table)  # not read without norms
        launch = self._few if rows < _MANY_ROWS else self._many
        launch(
            rows * self._kv_heads,
            qkv,
            kv_layer,
            positions,
            slots,
            self._table,
            q_norm,
            k_norm,
            self._unscale,
            kv_layer.stride(0) // kv_layer.shape[-1],
        )


@triton.jit
def stored(x, unscale, KIND: tl.constexpr):
    """Converts to the pool's type. FP8 holds up to 448; larger values must not become NaN."""
    if KIND.primitive_bitwidth == 8:
        x = tl.minimum(tl.maximum(x * unscale, -448.0), 448.0)
    return x.to(KIND)


@triton.jit
def _normed(x, rows_inverse, q_norm, k_norm, at, held, is_key):
    """x [GROUP_PAD, n] times each head's 1 / rms times the weight of its kind."""
    q_weight = tl.load(q_norm + at, mask=held, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm + at, mask=held, other=0.0).to(tl.float32)
    return x * rows_inverse * tl.where(is_key, k_weight[None, :], q_weight[None, :])


# The position of a step's inputs in their buffer depends on the step's shape: no alignment is
# assumed.
@triton.jit(
    do_not_specialize=["value_lines"], do_not_specialize_on_alignment=["positions", "slots"]
)
def _rope_kernel(
    qkv,  # [rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM]
    kv,  # [2, total_blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM]
    positions,
    slots,
    table,  # [context, 2 * HALF]
    q_norm,
    k_norm,
    unscale,
    value_lines,  # from a key's line of HEAD_DIM values to its value's
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program computes one key/value head of one row and the query heads that share it: GROUP
    rows of queries and one row of the key, in one tile."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KIND: tl.constexpr = kv.dtype.element_ty
    row = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    slot = tl.load(slots + row)
    if slot < 0:
        return
    i = tl.arange(0, HALF_PAD)
    turning = i < HALF
    turns = table + tl.load(positions + row).to(tl.int64) * (2 * HALF) + i
    cos = tl.load(turns, mask=turning, other=0.0)[None, :]
    sin = tl.load(turns + HALF, mask=turning, other=0.0)[None, :]
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)

    line = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    r = tl.arange(0, GROUP_PAD)
    is_key = (r == GROUP)[:, None]
    start = tl.where(r < GROUP, head * GROUP + r, HEADS + head)[:, None] * HEAD_DIM
    mine = (r <= GROUP)[:, None]
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, HALF + i
    held = mine & turning[None, :]
    a = tl.load(line + start + first[None, :], mask=held, other=0.0).to(tl.float32)
    b = tl.load(line + start + second[None, :], mask=held, other=0.0).to(tl.float32)
    dims = tl.arange(0, HEAD_PAD)
    value = tl.load(
        line + (HEADS + KV_HEADS + head) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0
    ).to(tl.float32)
    if REST_PAD > 0:
        past = 2 * HALF + tl.arange(0, REST_PAD)
        held_past = mine & (past < HEAD_DIM)[None, :]
        c = tl.load(line + start + past[None, :], mask=held_past, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST_PAD > 0:
            squares += tl.sum(c * c, 1)
            inverse = (1 / tl.sqrt(squares / HEAD_DIM + EPS))[:, None]
            c = _normed(c, inverse, q_norm, k_norm, past, past < HEAD_DIM, is_key)
        else:
            inverse = (1 / tl.sqrt(squares / HEAD_DIM + EPS))[:, None]
        a = _normed(a, inverse, q_norm, k_norm, first, turning, is_key)
        b = _normed(b, inverse, q_norm, k_norm, second, turning, is_key)
    turned_a = a * cos - b * sin
    turned_b = a * sin + b * cos

    block = slot // BLOCK_TOKENS
    place = (block * KV_HEADS + head) * BLOCK_TOKENS + slot % BLOCK_TOKENS
    in_place = held & ~is_key
    tl.store(line + start + first[None, :], turned_a.to(qkv.dtype.element_ty), mask=in_place)
    tl.store(line + start + second[None, :], turned_b.to(qkv.dtype.element_ty), mask=in_place)
    of_key = held & is_key
    keys = kv + place * HEAD_DIM + tl.zeros([GROUP_PAD, 1], tl.int32)
    tl.store(keys + first[None, :], stored(turned_a, unscale, KIND), mask=of_key)
    tl.store(keys + second[None, :], stored(turned_b, unscale, KIND), mask=of_key)
    if REST_PAD > 0:
        tl.store(keys + past[None, :], stored(c, unscale, KIND), mask=held_past & is_key)
        if NORM:
            tl.store(
                line + start + past[None, :],
                c.to(qkv.dtype.element_ty),
                mask=held_past & ~is_key,
            )
    values = kv + (place + value_lines) * HEAD_DIM + dims
    tl.store(values, stored(value, unscale, KIND), mask=dims < HEAD_DIM)
