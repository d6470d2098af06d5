"""Attention of long chunks on Hopper's matrix units: products of one tile of keys run beside the
exponentials of the next.

    kernel = PrefillKernel(spec, block_tokens)                     # one a layer
    kernel.launch(qkv, kv_layer, block_tables, items, capacity, out)

As attention.py's kernel, for steps none of whose tiles is cut (attention_plan.py: a Tile that is
`whole`), keys and values of 16 bits, heads of 64 or 128, blocks of 64 tokens or more. Written in
Gluon, Triton's lower level, for in Triton's own language a product is waited for where it is asked
for: matrix units idle during exponentials, and those during products. Two groups of four warps take
64 rows each. Knows nothing of scheduling, of how queries were rotated, or of other layers.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.backends.cuda.attention_plan import Tile
from headrace.backends.cuda.triton.launch import Launch
from headrace.models.spec import AttentionSpec, ModelSpec

PART_TOKENS = 64  # that one copy fetches: they lie in one block
ENABLED = False  # until benchmarks/cuda/attention.py has found it right, and faster, on a GPU
TILE = Tile(rows=128, keys=2 * PART_TOKENS, warps=8, stages=2, programs_per_sm=1, whole=True)


def can_prefill(spec: AttentionSpec, block_tokens: int, kv_dtype: torch.dtype) -> bool:
    """Whether this kernel does such a layer."""
    group = spec.heads // spec.kv_heads
    return (
        spec.head_dim in (64, 128)
        and block_tokens % PART_TOKENS == 0
        and kv_dtype in (torch.bfloat16, torch.float16)
        and TILE.rows % group == 0
    )


def can_prefill_on(device: torch.device, spec: ModelSpec, kv_layer: torch.Tensor) -> bool:
    """Whether all layers of a model whose pools are like this one are done by this kernel there."""
    if not ENABLED or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return all(can_prefill(a, kv_layer.shape[3], kv_layer.dtype) for a in spec.attention)


class PrefillKernel:
    """One layer's."""

    def __init__(self, spec: AttentionSpec, block_tokens: int) -> None:
        self._kv_heads = spec.kv_heads
        self._descriptors: dict[int, TensorDescriptor] = {}
        constants: dict[str, Any] = {
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_TOKENS": block_tokens,
            "BLOCK_M": TILE.rows,
            "PART": PART_TOKENS,
            "SCALE": spec.scale,
            "WINDOW": spec.window or 0,
            "SOFTCAP": spec.softcap or 0.0,
        }
        self._launch = Launch(_prefill_kernel, constants, {"num_warps": TILE.warps})

    def launch(
        self,
        qkv: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        items: torch.Tensor,
        capacity: int,
        out: torch.Tensor,
    ) -> None:
        self._launch(
            capacity * self._kv_heads,
            qkv,
            self._describe(kv_layer),
            block_tables,
            items,
            out,
            kv_layer.stride(0) // kv_layer.shape[-1],
            block_tables.stride(0),
        )

    def _describe(self, kv_layer: torch.Tensor) -> TensorDescriptor:
        """The pool as lines of head_dim values; kept, for a pool's address never changes."""
        key = kv_layer.data_ptr()
        if key not in self._descriptors:
            block = [PART_TOKENS, kv_layer.shape[-1]]
            kind = gl.bfloat16 if kv_layer.dtype is torch.bfloat16 else gl.float16
            layout = gl.NVMMASharedLayout.get_default_for(block, kind)
            lines = kv_layer.view(-1, kv_layer.shape[-1])
            self._descriptors[key] = TensorDescriptor.from_tensor(lines, block, layout)
        return self._descriptors[key]


@gluon.jit
def _line(
    table,
    at,
    end,
    head,
    KV_HEADS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
):
    """Where the keys from `at` on lie; past the end, where some others do."""
    block = gl.load(table + at // BLOCK_TOKENS, mask=at < end, other=0)
    return (block * KV_HEADS + head) * BLOCK_TOKENS + at % BLOCK_TOKENS


@gluon.jit
def _fetch(kv, first, second, ready, tiles, slot, wanted):
    """Two parts of a tile, asked for; `ready` tells when they are there."""
    barrier = ready.index(slot)
    mbarrier.expect(barrier, 2 * kv.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(kv, [first, 0], barrier, tiles.index(2 * slot), wanted)
    tma.async_copy_global_to_shared(kv, [second, 0], barrier, tiles.index(2 * slot + 1), wanted)


@gluon.jit
def _masked(scores, at, positions, WINDOW: gl.constexpr, LAYOUT: gl.constexpr):
    n = at + gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))
    seen = n[None, :] <= positions[:, None]
    if WINDOW > 0:
        seen = seen & (n[None, :] > positions[:, None] - WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _weigh(
    low,
    high,
    best,
    at,
    positions,
    MASKED: gl.constexpr,  # some rows may not see some keys
    SCALE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Weights of a tile's keys (its parts' apart), the greatest score, what older sums shrink by,
    and the sum of the weights. In base 2."""
    factor: gl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * 1.4426950408889634
    if SOFTCAP > 0:
        low = 1 - 2 / (1 + gl.exp(low * (2 * SCALE / SOFTCAP)))
        high = 1 - 2 / (1 + gl.exp(high * (2 * SCALE / SOFTCAP)))
    if MASKED:
        low = _masked(low, at, positions, WINDOW, LAYOUT)
        high = _masked(high, at + low.shape[1], positions, WINDOW, LAYOUT)
    new_best = gl.maximum(best, gl.max(gl.maximum(low, high), 1) * factor)
    low = gl.exp2(low * factor - new_best[:, None])
    high = gl.exp2(high * factor - new_best[:, None])
    return low, high, new_best, gl.exp2(best - new_best), gl.sum(low + high, 1)


@gluon.jit
def _attend(
    best,
    weight,
    total,
    p_low,  # weights of the tile before, whose values are still to be added
    p_high,
    next_first,  # where the next tile but one lies: its keys are asked for, its values not
    next_second,
    number,  # of tiles so far
    begin,
    stop,
    end,
    q,
    nothing,
    positions,
    kv,
    value_lines,
    table,
    head,
    keys_ready,
    values_ready,
    keys,
    values,
    MASKED: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    SCALE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    SCORES: gl.constexpr,  # layouts
    TOTAL: gl.constexpr,
):
    """Tiles from `begin` to `stop`: each one's scores, beside the values of the one before."""
    PART: gl.constexpr = nothing.shape[1]
    TILE: gl.constexpr = 2 * PART
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    for at in range(begin, stop, TILE):
        slot, phase = number % 2, (number // 2) & 1
        held, held_phase = 1 - slot, ((number - 1) // 2) & 1  # of the tile before
        # Where the tile after next lies, known by the time that it is asked for.
        first, second = next_first, next_second
        next_first = _line(table, at + 2 * TILE, end, head, KV_HEADS, BLOCK_TOKENS)
        next_second = _line(table, at + 2 * TILE + PART, end, head, KV_HEADS, BLOCK_TOKENS)
        mbarrier.wait(keys_ready.index(slot), phase)
        k_low, k_high = keys.index(2 * slot), keys.index(2 * slot + 1)
        low = warpgroup_mma(q, k_low.permute((1, 0)), nothing, use_acc=False, is_async=True)
        high = warpgroup_mma(q, k_high.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(values_ready.index(held), held_phase)
        total = warpgroup_mma(p_low, values.index(2 * held), total, is_async=True)
        total = warpgroup_mma(p_high, values.index(2 * held + 1), total, is_async=True)
        low, high = warpgroup_mma_wait(2, deps=[low, high])
        low, high, best, shrink, sums = _weigh(
            low, high, best, at, positions, MASKED, SCALE, SOFTCAP, WINDOW, SCORES
        )
        weight = weight * shrink + sums
        # Named as what is waited for, weights are computed before; and the assembler moves nothing
        # past a loop, which waiting for keys that are there is. Else both would put them off to
        # where they are used, and the products would have run alone.
        new_low = gl.convert_layout(low.to(kv.dtype), WEIGHTS)
        new_high = gl.convert_layout(high.to(kv.dtype), WEIGHTS)
        mbarrier.wait(keys_ready.index(slot), phase)
        total, weight, new_low, new_high, p_low, p_high = warpgroup_mma_wait(
            0, deps=[total, weight, new_low, new_high, p_low, p_high]
        )
        gl.thread_barrier()  # all have read this tile's keys and the values before
        _fetch(kv, next_first, next_second, keys_ready, keys, slot, at + 2 * TILE < end)
        values_first, values_second = first + value_lines, second + value_lines
        _fetch(kv, values_first, values_second, values_ready, values, held, at + TILE < end)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, TOTAL))[:, None]
        p_low, p_high = new_low, new_high
        number += 1
    return best, weight, total, p_low, p_high, next_first, next_second, number


@gluon.jit
def _clear_past(values, first, end, LAYOUT: gl.constexpr):
    """Values past the end become 0: they may be NaN, which a weight of 0 would not undo."""
    n = first + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    held = values.load(LAYOUT)
    values.store(gl.where((n < end)[:, None], held, 0.0))


@gluon.jit(
    do_not_specialize=["value_lines", "table_stride"],
    do_not_specialize_on_alignment=["items", "tables"],
)
def _prefill_kernel(
    qkv,  # [rows, qkv_width]
    kv,  # descriptor of [2 * total_blocks * KV_HEADS * BLOCK_TOKENS, HEAD_DIM]
    tables,  # [sequences, table_stride]
    items,  # [capacity, 8]
    out,  # [rows, HEADS * HEAD_DIM]
    value_lines,  # from a key's line to its value's
    table_stride,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PART: gl.constexpr,
    SCALE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    GROUP: gl.constexpr = HEADS // KV_HEADS
    WARPS: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = 2 * PART
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    memory_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)

    program = gl.program_id(0)
    head = program % KV_HEADS
    item = items + (program // KV_HEADS) * 8
    tokens = gl.load(item + 1)
    if tokens == 0:
        return
    row = gl.load(item)
    position = gl.load(item + 2)
    table = tables + gl.load(item + 3).to(gl.int64) * table_stride
    begin = gl.load(item + 4)
    end = gl.load(item + 5)

    keys_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(values_ready.index(i), count=1)
    keys = gl.allocate_shared_memory(kv.dtype, [4, PART, HEAD_DIM], kv.layout)
    values = gl.allocate_shared_memory(kv.dtype, [4, PART, HEAD_DIM], kv.layout)
    first = _line(table, begin, end, head, KV_HEADS, BLOCK_TOKENS)
    second = _line(table, begin + PART, end, head, KV_HEADS, BLOCK_TOKENS)
    next_first = _line(table, begin + TILE, end, head, KV_HEADS, BLOCK_TOKENS)
    next_second = _line(table, begin + TILE + PART, end, head, KV_HEADS, BLOCK_TOKENS)
    more = begin + TILE < end
    _fetch(kv, first, second, keys_ready, keys, 0, True)
    _fetch(kv, next_first, next_second, keys_ready, keys, 1, more)
    _fetch(kv, first + value_lines, second + value_lines, values_ready, values, 0, True)
    _fetch(kv, next_first + value_lines, next_second + value_lines, values_ready, values, 1, more)

    r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, memory_layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, memory_layout))
    columns = (head * GROUP + r % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    line = (row + r // GROUP).to(gl.int64)[:, None]
    q = gl.load(
        qkv + line * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + columns,
        mask=(r < tokens * GROUP)[:, None],
        other=0.0,
    )
    q = gl.convert_layout(q.to(kv.dtype), q_layout)
    positions = position + gl.arange(0, BLOCK_M, row_layout) // GROUP
    best = gl.full([BLOCK_M], -1.0e30, gl.float32, row_layout)
    weight = gl.zeros([BLOCK_M], gl.float32, row_layout)
    total = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, total_layout)
    nothing = gl.zeros([BLOCK_M, PART], gl.float32, scores_layout)

    # The first tile's weights; then, each time, the next one's scores beside this one's values.
    mbarrier.wait(keys_ready.index(0), 0)
    low = warpgroup_mma(q, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    high = warpgroup_mma(q, keys.index(1).permute((1, 0)), nothing, use_acc=False, is_async=True)
    low, high = warpgroup_mma_wait(0, deps=[low, high])
    gl.thread_barrier()  # all have read the keys: others may take their place
    at = begin + 2 * TILE
    next_first = _line(table, at, end, head, KV_HEADS, BLOCK_TOKENS)
    next_second = _line(table, at + PART, end, head, KV_HEADS, BLOCK_TOKENS)
    _fetch(kv, next_first, next_second, keys_ready, keys, 0, at < end)
    low, high, best, _, weight = _weigh(
        low, high, best, begin, positions, True, SCALE, SOFTCAP, WINDOW, scores_layout
    )
    p_low = gl.convert_layout(low.to(kv.dtype), p_layout)
    p_high = gl.convert_layout(high.to(kv.dtype), p_layout)

    # Keys that every row sees need no mask.
    number = 1
    masked_from = begin + TILE
    if WINDOW == 0:
        masked_from = gl.maximum(masked_from, begin + (position + 1 - begin) // TILE * TILE)
        best, weight, total, p_low, p_high, next_first, next_second, number = _attend(
            best, weight, total, p_low, p_high, next_first, next_second, number,
            begin + TILE, masked_from, end, q, nothing, positions, kv, value_lines, table, head,
            keys_ready, values_ready, keys, values, False, KV_HEADS, BLOCK_TOKENS, SCALE, SOFTCAP,
            WINDOW, scores_layout, total_layout,
        )  # fmt: skip
    best, weight, total, p_low, p_high, next_first, next_second, number = _attend(
        best, weight, total, p_low, p_high, next_first, next_second, number,
        masked_from, end, end, q, nothing, positions, kv, value_lines, table, head,
        keys_ready, values_ready, keys, values, True, KV_HEADS, BLOCK_TOKENS, SCALE, SOFTCAP,
        WINDOW, scores_layout, total_layout,
    )  # fmt: skip

    held, held_phase = (number - 1) % 2, ((number - 1) // 2) & 1
    mbarrier.wait(values_ready.index(held), held_phase)
    v_low, v_high = values.index(2 * held), values.index(2 * held + 1)
    last = begin + (number - 1) * TILE
    _clear_past(v_low, last, end, memory_layout)
    _clear_past(v_high, last + PART, end, memory_layout)
    fence_async_shared()
    total = warpgroup_mma(p_low, v_low, total, is_async=True)
    total = warpgroup_mma(p_high, v_high, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])
    for i in gl.static_range(2):
        mbarrier.invalidate(keys_ready.index(i))
        mbarrier.invalidate(values_ready.index(i))

    total = total * gl.convert_layout(1 / weight, gl.SliceLayout(1, total_layout))[:, None]
    answer = gl.convert_layout(total.to(out.dtype.element_ty), memory_layout)
    place = out + line * (HEADS * HEAD_DIM) + columns
    gl.store(place, answer, mask=(r < tokens * GROUP)[:, None])
