"""Attention over keys and values in blocks, for any mix of chunk lengths, in one launch.

How a runner uses it (numpy side: plan.py):

    shape = WorkShape(kv_heads=8, group=4, multiprocessors=132, max_sequences=256)
    workspace = AttentionWorkspace(shape, head_dim=128, device)     # one for all layers
    kernel = AttentionKernel(spec, shape, block_tokens, workspace)  # one per layer
    tile = kernel.tile(shape.tile_rows(counts.max()))               # by what the step holds
    n = shape.capacity(row_bucket, tile)                            # fixed in a graph
    plan_attention(starts, counts, items_host[:n], shape, tile, window=spec.window)
    items_device[:n].copy_(items_host[:n])                          # [>= n, FIELDS] int32
    kernel.launch(qkv, kv_layer, block_tables, items_device, n, tile, out)

`launch` reads rotated queries from qkv [rows, qkv_width], and all keys and values, including this
step's, from kv_layer [2, total_blocks, kv_heads, block_tokens, head_dim]. It writes only the rows
of out [rows, q_width] that items name. Its grid is n * kv_heads programs; everything that varies
between replays of a graph is in `items` and `block_tables`.

Queries of one tile are rows [token, head of the group]: row r is token r // group. Scores are in
base 2. Partial results of a split tile go to the workspace; the program that finishes last (by an
atomic counter) adds them up and resets the counter to zero.

Knows nothing of scheduling, of how queries were rotated, or of other layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.backends.cuda.attention.plan import Tile, WorkShape, default_tile
from headrace.backends.cuda.attention.tiles import (
    attend_keys,
    attend_pairs,
    finish,
    prefetch_keys,
)
from headrace.backends.cuda.launch import (
    Launch,
    dependent_launch,
    let_next_start,
    wait_for_previous,
)
from headrace.models.spec import AttentionSpec

INTERPRETED = bool(triton.knobs.runtime.interpret)


class AttentionWorkspace:
    """Partial results and counters. Layers run one after the other, so they share one workspace."""

    def __init__(self, shape: WorkShape, head_dim: int, device: torch.device) -> None:
        sums, weights, counters = shape.workspace(head_dim)
        self.sums = torch.empty(sums, dtype=torch.float32, device=device)
        self.weights = torch.empty(weights, dtype=torch.float32, device=device)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)


class AttentionKernel:
    """One layer's attention. Stored keys and values are multiplied by `kv_scale` (for fp8)."""

    def __init__(
        self,
        spec: AttentionSpec,
        shape: WorkShape,
        block_tokens: int,
        workspace: AttentionWorkspace,
        *,
        kv_scale: float = 1.0,
        dependent: bool = False,
        prefetch: bool | None = None,  # fetch keys before the previous kernel has ended
    ) -> None:
        self._prefetch = dependent if prefetch is None else prefetch
        self._workspace = workspace
        self._kv_scale = kv_scale
        self._kv_heads = shape.kv_heads
        self._head_dim = spec.head_dim
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}
        self._options = dependent_launch(dependent)
        self._launches: dict[tuple[Tile, torch.dtype], Launch] = {}
        self._constants: dict[str, Any] = {
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "HEAD_DIM": spec.head_dim,
            "HEAD_PAD": triton.next_power_of_2(spec.head_dim),
            "BLOCK_TOKENS": block_tokens,
            "SCALE": spec.scale,
            "WINDOW": spec.window or 0,
            "SOFTCAP": spec.softcap or 0.0,
            "DEPENDENT": dependent,
        }

    def tile(self, rows: int) -> Tile:
        return default_tile(rows, self._head_dim)

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
        one_byte = kv_layer.element_size() == 1
        descriptor = tile.descriptor and tile.keys <= kv_layer.shape[3] and not one_byte
        # Small tiles read one-byte values in pairs; large ones need registers to widen them.
        pairs = one_byte and tile.rows < 64
        warps = max(8, tile.warps) if one_byte and tile.rows == 128 else tile.warps
        launch = self._launches.get((tile, kv_layer.dtype))
        if launch is None:
            constants = {
                **self._constants,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.keys,
                "STAGES": tile.stages,
                "DESCRIPTOR": descriptor,
                "PAIRS": pairs,
                "PREFETCH": self._prefetch and tile.rows < 64 and not descriptor,
                "INTERPRETED": INTERPRETED,
            }
            options = {**self._options, "num_warps": warps}
            launch = Launch(_attention_kernel, constants, options)
            self._launches[tile, kv_layer.dtype] = launch
        pool = kv_layer.view(torch.int16) if pairs else kv_layer
        launch(
            capacity * self._kv_heads,
            qkv,
            self._describe(kv_layer, tile) if descriptor else pool,
            block_tables,
            items,
            self._workspace.sums,
            self._workspace.weights,
            self._workspace.counters,
            out,
            self._kv_scale,
            kv_layer.stride(0) // self._head_dim,
            block_tables.stride(0),
        )

    def _describe(self, kv_layer: torch.Tensor, tile: Tile) -> TensorDescriptor:
        """The pool as lines of head_dim values, for the tensor memory accelerator. Cached, as a
        pool's address never changes."""
        key = (kv_layer.data_ptr(), tile.keys)
        if key not in self._descriptors:
            self._descriptors[key] = TensorDescriptor.from_tensor(
                kv_layer.view(-1, self._head_dim),
                [tile.keys, triton.next_power_of_2(self._head_dim)],
            )
        return self._descriptors[key]


# The position of a step's inputs in their buffer depends on the step's shape: no alignment is
# assumed.
@triton.jit(
    do_not_specialize=["value_lines", "table_stride"],
    do_not_specialize_on_alignment=["items", "tables"],
)
def _attention_kernel(
    qkv,  # [rows, qkv_width]
    kv,  # [2, total_blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM], or a descriptor of its lines
    tables,  # [sequences, table_stride]
    items,  # [capacity, 8]
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
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PAIRS: tl.constexpr,
    PREFETCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    head = program % KV_HEADS
    item = items + (program // KV_HEADS) * 8
    tokens = tl.load(item + 1)
    if tokens == 0:
        return
    row = tl.load(item)
    position = tl.load(item + 2)
    sequence = tl.load(item + 3)
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    partial = tl.load(item + 6)
    split = tl.load(item + 7)
    splits = split // 65536
    split = split % 65536
    table = tables + sequence.to(tl.int64) * table_stride
    if PREFETCH:
        VALUES: tl.constexpr = 2 if PAIRS else 1  # in an element
        for tile in tl.static_range(2):
            prefetch_keys(
                kv, value_lines, table, head, begin + tile * BLOCK_N, end, KV_HEADS,
                HEAD_DIM // VALUES, BLOCK_TOKENS, BLOCK_N, INTERPRETED,
            )  # fmt: skip
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)

    r = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    token = r // GROUP
    rows = tokens * GROUP
    held = (r < rows)[:, None] & (dims < HEAD_DIM)[None, :]
    columns = (head * GROUP + r % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    line = (row + token).to(tl.int64)[:, None]
    q = tl.load(qkv + line * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + columns, mask=held, other=0.0)
    # One-byte values are multiplied as float16, which represents them exactly.
    KIND: tl.constexpr = kv.dtype if DESCRIPTOR else kv.dtype.element_ty
    ONE_BYTE: tl.constexpr = PAIRS or KIND.primitive_bitwidth == 8
    DOT_TYPE: tl.constexpr = tl.float16 if ONE_BYTE else KIND
    q = q.to(DOT_TYPE)
    positions = position + token
    if SOFTCAP > 0:
        score_scale = kv_scale * (SCALE / SOFTCAP)
    else:
        score_scale = kv_scale * (SCALE * 1.4426950408889634)

    total = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    best = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a row that sees no key must not be NaN
    weight = tl.zeros([BLOCK_M], tl.float32)
    # Keys that every row sees need no mask. Small tiles are bound by memory: one loop is enough.
    plain_from = begin
    plain_to = begin
    if BLOCK_M >= 64:
        plain_to = tl.maximum(tl.minimum((position + 1) // BLOCK_N * BLOCK_N, end), begin)
        if WINDOW > 0:
            seen_by_all = tl.maximum(position + tokens - WINDOW, 0)
            plain_from = tl.maximum((seen_by_all + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin)
            plain_from = tl.minimum(plain_from, plain_to)
            total, best, weight = attend_keys(
                total, best, weight, q, positions, kv, value_lines, table, head,
                begin, plain_from, end, score_scale, True, DESCRIPTOR, KV_HEADS, HEAD_DIM, HEAD_PAD,
                BLOCK_TOKENS, BLOCK_N, WINDOW, SOFTCAP, DOT_TYPE, STAGES,
            )  # fmt: skip
        total, best, weight = attend_keys(
            total, best, weight, q, positions, kv, value_lines, table, head,
            plain_from, plain_to, end, score_scale, False, DESCRIPTOR, KV_HEADS, HEAD_DIM, HEAD_PAD,
            BLOCK_TOKENS, BLOCK_N, WINDOW, SOFTCAP, DOT_TYPE, STAGES,
        )  # fmt: skip
    if PAIRS:
        total, best, weight = attend_pairs(
            total, best, weight, q, positions, kv, value_lines, table, head,
            begin, end, end, score_scale, KV_HEADS, HEAD_DIM, HEAD_PAD,
            BLOCK_TOKENS, BLOCK_N, WINDOW, SOFTCAP, STAGES, INTERPRETED,
        )  # fmt: skip
    else:
        total, best, weight = attend_keys(
            total, best, weight, q, positions, kv, value_lines, table, head,
            plain_to, end, end, score_scale, True, DESCRIPTOR, KV_HEADS, HEAD_DIM, HEAD_PAD,
            BLOCK_TOKENS, BLOCK_N, WINDOW, SOFTCAP, DOT_TYPE, STAGES,
        )  # fmt: skip

    finish(
        total, best, weight, out + line * (HEADS * HEAD_DIM) + columns, rows, partial, split,
        splits, head, kv_scale, sums, weights, counters, KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_M,
    )  # fmt: skip
