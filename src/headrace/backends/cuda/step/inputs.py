"""A plan as arrays on the device: one packed buffer, one copy per step.

    packed  | count | wanted rows | token ids | positions | slots | changed blocks | work lists |

The offsets of the buffer's parts depend only on the step's shape (its bucket of rows and its
attention tile), so that a graph captured for a shape finds them, and only what the step needs is
copied. It includes the changes of block tables (block_tables.py) and attention's work lists
(backends/cuda/attention/work_lists.py).

Plans were checked (backends/shared) except for their blocks: block_tables.py checks new ones.
Knows no weights, no graphs, and nothing of draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.attention.plan import (
    FIELDS,
    Tile,
    WorkShape,
    default_tile,
)
from headrace.backends.cuda.attention.work_lists import WorkLists
from headrace.backends.cuda.step.block_tables import BlockTables
from headrace.backends.cuda.step.prepare import launch_prepare
from headrace.backends.cuda.step.shapes import (
    CHANGES,
    COUNT,
    StepShape,
    aligned,
    header_ints,
    packed_ints,
)
from headrace.backends.shared.flight import Continued
from headrace.core.step import RunnerLimits, StepPlan

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_HOST_BUFFERS = 3  # in turn: two steps may be in flight while a third is written


@dataclass(frozen=True, slots=True)
class StepViews:
    """The parts of the packed buffer for one shape."""

    shape: StepShape
    tile: Tile
    items: int  # the capacity of each work list
    used: torch.Tensor  # the part of the buffer in use, from its beginning
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor  # i64
    places: torch.Tensor
    blocks: torch.Tensor
    work: tuple[torch.Tensor, ...]  # one for each window, [items, FIELDS]


class StepInputs:
    def __init__(
        self,
        limits: RunnerLimits,
        shape: WorkShape,
        *,
        head_dim: int,
        windows: Sequence[int | None],
        wanted_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._limits = limits
        self._work_shape = shape
        self._head_dim = head_dim
        self._windows = tuple(windows)
        self._vocab_size = vocab_size
        self._device = device
        self._wanted_rows = wanted_rows
        self._header = header_ints(wanted_rows)
        size = packed_ints(shape, limits.max_batch_tokens, wanted_rows, head_dim, len(windows))
        self.packed = torch.zeros(size, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_HOST_BUFFERS)
        ]
        self._turn = 0
        self.tokens = torch.zeros(limits.max_batch_tokens, dtype=torch.int32, device=device)
        self._tables = BlockTables(limits, device)
        self._work_lists = WorkLists(windows, shape)
        self._views: dict[StepShape, StepViews] = {}
        self._host_views: dict[tuple[int, StepShape], _HostViews] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.packed.nbytes + self.tokens.nbytes + self.tables.nbytes

    @property
    def tables(self) -> torch.Tensor:
        """Block tables, one row for each recently computed sequence: i32 [sequences, width]"""
        return self._tables.on_device

    @property
    def wanted(self) -> torch.Tensor:
        """The rows of the step whose logits are wanted: i32 [wanted_rows]"""
        return self.packed[COUNT : COUNT + self._wanted_rows]

    def shape_of(self, longest: int, rows: int) -> StepShape:
        """The shape of a step whose longest chunk has `longest` tokens, padded to `rows` rows."""
        return StepShape(rows, self._work_shape.tile_rows(longest), longest == 1)

    def views(self, shape: StepShape) -> StepViews:
        """On the device."""
        if shape not in self._views:
            self._views[shape] = self._cut(self.packed, shape)
        return self._views[shape]

    def launch(self, shape: StepShape, drawn: torch.Tensor) -> None:
        """Launches the kernel that prepares tokens and block tables. `drawn` are the tokens that
        the previous step drew."""
        views = self.views(shape)
        launch_prepare(
            views.token_ids,
            drawn,
            self.tokens,
            self.packed[:1],
            views.places,
            views.blocks,
            self.tables,
        )

    def fill(
        self,
        plan: StepPlan,
        wanted: Ints,
        continued: Continued,
        drawn_before: Ints,
        shape: StepShape,
    ) -> None:
        """Write a step and send it. `drawn_before` is the wanted row of each draw of the previous
        step, by its rows. If `wanted` does not fit, the code that computes the logits sends its
        rows in pieces."""
        counts, starts = np.array(plan.counts, np.int64), np.array(plan.starts, np.int64)
        tokens = np.array(plan.token_ids, np.int32)
        if continued.rows:  # where on the device these tokens are
            tokens[continued.places] = -1 - drawn_before[continued.before]
        table_rows, places, blocks = self._tables.update(plan, starts + counts)
        positions, slots = self._positions(starts, counts, table_rows)
        self._turn = (self._turn + 1) % _HOST_BUFFERS
        host, views = self._host(shape), self.views(shape)
        total = len(tokens)
        host.token_ids[:total], host.token_ids[total:] = tokens, 0
        host.positions[:total], host.positions[total:] = positions, 0
        host.slots[:total], host.slots[total:] = slots, -1
        some = wanted[: self._wanted_rows]
        host.wanted[: len(some)], host.wanted[len(some) :] = some, 0
        fits = len(places) <= len(host.places)
        host.count[0] = len(places) if fits else 0
        if fits:
            host.places[: len(places)], host.blocks[: len(places)] = places, blocks
        self._work_lists.write(host.work, starts, counts, table_rows, views.tile)
        views.used.copy_(host.used, non_blocking=True)
        if not fits:
            self._tables.send(places, blocks)

    def clear(self, shape: StepShape) -> None:
        """Send a step that is all padding, to capture graphs with."""
        views = self.views(shape)
        views.used.zero_()
        views.slots.fill_(-1)

    # -- the buffer --------------------------------------------------------------------------------

    def _tile(self, shape: StepShape) -> Tile:
        return default_tile(shape.tile_rows, self._head_dim)

    def _cut(self, buffer: torch.Tensor, shape: StepShape) -> StepViews:
        rows, padded = shape.rows, aligned(shape.rows)
        tile = self._tile(shape)
        items = self._work_shape.capacity(rows, tile)
        at = self._header

        def take(count: int) -> torch.Tensor:
            nonlocal at
            at += count
            return buffer[at - count : at]

        slots = take(2 * padded).view(torch.int64)[:rows]
        token_ids, positions = take(padded)[:rows], take(padded)[:rows]
        places, blocks = take(padded + CHANGES), take(padded + CHANGES)
        work = tuple(take(items * FIELDS).view(items, FIELDS) for _ in self._windows)
        parts = (token_ids, positions, slots, places, blocks, work)
        return StepViews(shape, tile, items, buffer[:at], *parts)

    def _host(self, shape: StepShape) -> _HostViews:
        key = (self._turn, shape)
        if key not in self._host_views:
            buffer = self._hosts[self._turn]
            wanted = buffer[COUNT : COUNT + self._wanted_rows]
            self._host_views[key] = _HostViews(buffer[:1], wanted, self._cut(buffer, shape))
        return self._host_views[key]

    # -- rows --------------------------------------------------------------------------------------

    def _positions(self, starts: Longs, counts: Longs, table_rows: Ints) -> tuple[Longs, Longs]:
        size = self._limits.block_tokens
        positions = starts
        if len(starts) != (total := int(counts.sum())):
            first_rows = np.cumsum(counts) - counts
            positions = np.arange(total) + np.repeat(starts - first_rows, counts)
            table_rows = np.repeat(table_rows, counts)
        at, inside = np.divmod(positions, size)
        return positions, self._tables.blocks(table_rows, at) * size + inside


class _HostViews:
    """The parts of a host buffer as numpy arrays."""

    def __init__(self, count: torch.Tensor, wanted: torch.Tensor, views: StepViews) -> None:
        self.used = views.used
        self.count: Ints = count.numpy()
        self.wanted: Ints = wanted.numpy()
        self.token_ids: Ints = views.token_ids.numpy()
        self.positions: Ints = views.positions.numpy()
        self.slots: Longs = views.slots.numpy()
        self.places: Ints = views.places.numpy()
        self.blocks: Ints = views.blocks.numpy()
        self.work: list[Ints] = [work.numpy() for work in views.work]
