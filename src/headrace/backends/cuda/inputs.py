"""A plan as arrays on the device: one packed buffer, one copy a step.

    packed  | count | wanted rows | token ids | positions | slots | changed blocks | work lists |

The buffer's parts lie where the step's shape (its bucket of rows, and the tile of its attention)
says, so that a graph captured for a shape finds them and nothing more than the step needs is
copied. Block tables stay on the device, a row for each sequence that was computed lately, and only
changes are sent: a table whose list is the one of the step before, continued where that ended, can
differ only from the block of its first new token on.

Plans are checked here: a kernel must not meet a block or a token that is not there. Knows no
weights, no graphs, and nothing of what is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.attention_plan import (
    FIELDS,
    LONG_TOKENS,
    SEQUENCE,
    Tile,
    WorkShape,
    plan_attention,
)
from headrace.backends.cuda.triton.attention import default_tile
from headrace.backends.cuda.triton.prepare import launch_prepare
from headrace.core.errors import HeadraceError
from headrace.core.step import PREVIOUS, RunnerLimits, StepEntry

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_HOST_BUFFERS = 3  # in turn: two steps may be in flight while a third is written
_CHANGES = 256  # of block tables in one step, beyond one a row
_COUNT = 4  # int32 at the buffer's start, of which the first counts the changes


def _aligned(count: int) -> int:
    """Parts begin at 16 bytes: kernels are compiled anew for pointers that do not."""
    return -(-count // 4) * 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for."""

    rows: int  # a bucket: the step's own rows, and padding
    tile_rows: int  # of its attention
    is_decode: bool = False  # every sequence computes one token


@dataclass(frozen=True, slots=True)
class StepViews:
    """The parts of the packed buffer for one shape; on the host with `numpy` arrays in mind."""

    shape: StepShape
    tile: Tile
    items: int  # the capacity of each work list
    size: int  # int32 in all
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor  # i64
    places: torch.Tensor
    blocks: torch.Tensor
    work: tuple[torch.Tensor, ...]  # one for each window, [items, FIELDS]


@dataclass(slots=True)
class _Row:
    """A row of the block tables, and the sequence in it."""

    number: int
    table: list[int]  # the very list: held, so that no other can take its identity
    end: int  # the position after the last computed one


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
        self._header = _COUNT + _aligned(wanted_rows)
        self.table_width = -(-limits.context_tokens // limits.block_tokens)
        size = max(
            self._measure(StepShape(limits.max_batch_tokens, rows)) for rows in self._tile_sizes()
        )
        self.packed = torch.zeros(size, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_HOST_BUFFERS)
        ]
        self._turn = 0
        self.tokens = torch.zeros(limits.max_batch_tokens, dtype=torch.int32, device=device)
        self.tables = torch.zeros(
            (limits.max_sequences, self.table_width), dtype=torch.int32, device=device
        )
        self._mirror = np.zeros((limits.max_sequences, self.table_width), np.int32)
        self._rows: dict[int, _Row] = {}
        self._free = list(range(limits.max_sequences - 1, -1, -1))
        self._views: dict[StepShape, StepViews] = {}
        self._host_views: dict[tuple[int, StepShape], _HostViews] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.packed.nbytes + self.tokens.nbytes + self.tables.nbytes

    @property
    def wanted(self) -> torch.Tensor:
        """Which rows of the step the logits are wanted of: i32 [wanted_rows]"""
        return self.packed[_COUNT : _COUNT + self._wanted_rows]

    def shape_of(self, entries: Sequence[StepEntry], rows: int) -> StepShape:
        """For a step whose rows are padded to `rows`."""
        longest = max(len(entry.token_ids) for entry in entries)
        return StepShape(rows, self._work_shape.tile_rows(longest), longest == 1)

    def views(self, shape: StepShape) -> StepViews:
        """On the device."""
        if shape not in self._views:
            self._views[shape] = self._cut(self.packed, shape)
        return self._views[shape]

    def launch(self, shape: StepShape, drawn: torch.Tensor) -> None:
        """Tokens and block tables are ready after this; `drawn` is what the step before drew."""
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
        entries: Sequence[StepEntry],
        wanted: Ints,
        drawn_before: Mapping[int, int],
        shape: StepShape,
    ) -> None:
        """Write a step and send it. `wanted` may be longer than there is room for: then whoever
        computes the logits sends its rows himself."""
        counts = np.array([len(entry.token_ids) for entry in entries], np.int64)
        starts = np.array([entry.start for entry in entries], np.int64)
        tokens = self._tokens(entries, drawn_before)
        try:
            table_rows, places, blocks = self._update_tables(entries, starts, counts)
            positions, slots = self._positions(starts, counts, table_rows)
        except HeadraceError:
            self._forget()
            raise
        self._turn = (self._turn + 1) % _HOST_BUFFERS
        host = self._host(shape)
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
        for items, window in zip(host.work, self._windows, strict=True):
            shared = (starts, counts, items, self._work_shape)
            plan_attention(*shared, self.views(shape).tile, window=window)
            items[:, SEQUENCE] = table_rows[items[:, SEQUENCE]]
        size = self.views(shape).size
        self.packed[:size].copy_(self._hosts[self._turn][:size], non_blocking=True)
        if not fits:
            self._send_changes(places, blocks)

    def clear(self, shape: StepShape) -> None:
        """A step of nothing but padding, sent: to capture graphs with."""
        views = self.views(shape)
        self.packed[: views.size].zero_()
        views.slots.fill_(-1)

    # -- the buffer --------------------------------------------------------------------------------

    def _tile_sizes(self) -> list[int]:
        """Every tile that a step may get."""
        shape, most = self._work_shape, self._limits.max_batch_tokens
        return sorted(
            {shape.tile_rows(min(tokens, most)) for tokens in (1, 2, 4, 8, 16, 32, LONG_TOKENS)}
        )

    def _tile(self, shape: StepShape) -> Tile:
        return default_tile(shape.tile_rows, self._head_dim)

    def _measure(self, shape: StepShape) -> int:
        tile = self._tile(shape)
        work = self._work_shape.capacity(shape.rows, tile) * FIELDS * len(self._windows)
        rows = _aligned(shape.rows)
        return self._header + 4 * rows + 2 * (rows + _CHANGES) + work

    def _cut(self, buffer: torch.Tensor, shape: StepShape) -> StepViews:
        rows, padded = shape.rows, _aligned(shape.rows)
        tile = self._tile(shape)
        items = self._work_shape.capacity(rows, tile)
        at = self._header

        def take(count: int) -> torch.Tensor:
            nonlocal at
            at += count
            return buffer[at - count : at]

        slots = take(2 * padded).view(torch.int64)[:rows]
        token_ids, positions = take(padded)[:rows], take(padded)[:rows]
        places, blocks = take(padded + _CHANGES), take(padded + _CHANGES)
        work = tuple(take(items * FIELDS).view(items, FIELDS) for _ in self._windows)
        return StepViews(shape, tile, items, at, token_ids, positions, slots, places, blocks, work)

    def _host(self, shape: StepShape) -> _HostViews:
        key = (self._turn, shape)
        if key not in self._host_views:
            buffer = self._hosts[self._turn]
            wanted = buffer[_COUNT : _COUNT + self._wanted_rows]
            self._host_views[key] = _HostViews(buffer[:1], wanted, self._cut(buffer, shape))
        return self._host_views[key]

    def _send_changes(self, places: Ints, blocks: Ints) -> None:
        """More changes than the buffer has room for: sequences that are all new, with long tables.
        They go by themselves, after the step's copy and before its first kernel."""
        sent = []
        for values in (places.astype(np.int64), blocks):
            tensor = torch.from_numpy(values)
            if self._device.type == "cuda":
                tensor = tensor.pin_memory().to(self._device, non_blocking=True)
            sent.append(tensor)
        self.tables.view(-1).index_copy_(0, sent[0], sent[1])

    # -- rows --------------------------------------------------------------------------------------

    def _tokens(self, entries: Sequence[StepEntry], drawn_before: Mapping[int, int]) -> Ints:
        tokens = np.array(list(chain.from_iterable(entry.token_ids for entry in entries)), np.int32)
        if tokens.max() >= self._vocab_size or tokens.min() < PREVIOUS:
            raise _mistaken("a token outside the vocabulary", f"0 to {self._vocab_size - 1}")
        unknown = np.flatnonzero(tokens == PREVIOUS)
        if len(unknown):
            tokens[unknown] = self._unknown_tokens(entries, len(unknown), drawn_before)
        return tokens

    def _unknown_tokens(
        self, entries: Sequence[StepEntry], count: int, drawn_before: Mapping[int, int]
    ) -> list[int]:
        """Where on the device the tokens are that the step before drew, as -1 - its wanted row."""
        asking = [e.sequence_id for e in entries if e.token_ids == [PREVIOUS]]
        if self._limits.steps_in_flight == 1:
            raise _mistaken("PREVIOUS", "token ids, as only one step is in flight")
        if len(asking) != count:
            raise _mistaken("PREVIOUS among several tokens", "it as the only one")
        try:
            return [-1 - drawn_before[sequence_id] for sequence_id in asking]
        except KeyError as error:
            raise _mistaken(
                f"PREVIOUS for sequence {error.args[0]}",
                "a token id, as the step before drew none for it",
            ) from None

    def _positions(self, starts: Longs, counts: Longs, table_rows: Ints) -> tuple[Longs, Longs]:
        size = self._limits.block_tokens
        positions = starts
        if len(starts) != (total := int(counts.sum())):
            first_rows = np.cumsum(counts) - counts
            positions = np.arange(total) + np.repeat(starts - first_rows, counts)
            table_rows = np.repeat(table_rows, counts)
        at, inside = np.divmod(positions, size)
        blocks = self._mirror[table_rows, at].astype(np.int64)
        if blocks.min() < 0 or blocks.max() >= self._limits.total_blocks:
            raise _mistaken(
                "a block that is not in the pool", f"0 to {self._limits.total_blocks - 1}"
            )
        return positions, blocks * size + inside

    # -- block tables ------------------------------------------------------------------------------

    def _update_tables(
        self, entries: Sequence[StepEntry], starts: Longs, counts: Longs
    ) -> tuple[Ints, Ints, Ints]:
        """The entries' rows of the tables; and what changed in these: places and block numbers."""
        size, limits = self._limits.block_tokens, self._limits
        ends = starts + counts
        if ends.max() > limits.context_tokens or starts.min() < 0:
            raise _mistaken("positions past the context", f"at most {limits.context_tokens}")
        numbers: list[int] = []
        whole: list[int] = []  # entries whose tables are sent from `first` on
        for at, entry in enumerate(entries):
            row = self._rows.get(entry.sequence_id)
            if row is None:
                row = self._take_row(entry, entries)
            if row.table is not entry.block_table or row.end != entry.start:
                row.table = entry.block_table
                whole.append(at)
            row.end = entry.start + len(entry.token_ids)
            numbers.append(row.number)
        table_rows = np.array(numbers, np.int32)
        first, last = starts // size, (ends - 1) // size
        first[whole] = 0
        try:
            new = [e.block_table[at] for e, at in zip(entries, first.tolist(), strict=True)]
        except IndexError:
            raise _mistaken(
                "a block table that is too short", "one that covers its tokens"
            ) from None
        blocks = np.array(new, np.int32)
        changed = np.flatnonzero(self._mirror[table_rows, first] != blocks)
        self._mirror[table_rows, first] = blocks
        places = [table_rows[changed] * self.table_width + first[changed]]
        values = [blocks[changed]]
        for at in np.flatnonzero(last > first).tolist():
            begin, end = int(first[at]) + 1, int(last[at]) + 1
            part = np.array(entries[at].block_table[begin:end], np.int32)
            if len(part) != end - begin:
                raise _mistaken("a block table that is too short", "one that covers its tokens")
            row_at = int(table_rows[at])
            self._mirror[row_at, begin:end] = part
            places.append(np.arange(begin, end) + row_at * self.table_width)
            values.append(part)
        return table_rows, np.concatenate(places).astype(np.int32), np.concatenate(values)

    def _forget(self) -> None:
        """A plan was refused, perhaps half-way: every table is sent anew."""
        self._rows.clear()
        self._free = list(range(self._limits.max_sequences - 1, -1, -1))
        self._mirror[:] = -1

    def _take_row(self, entry: StepEntry, entries: Sequence[StepEntry]) -> _Row:
        if not self._free:
            here = {each.sequence_id for each in entries}
            for sequence_id in [s for s in self._rows if s not in here]:
                self._free.append(self._rows.pop(sequence_id).number)
        row = _Row(self._free.pop(), [], -1)
        self._rows[entry.sequence_id] = row
        return row


class _HostViews:
    """The parts of a host buffer as numpy arrays."""

    def __init__(self, count: torch.Tensor, wanted: torch.Tensor, views: StepViews) -> None:
        self.count: Ints = count.numpy()
        self.wanted: Ints = wanted.numpy()
        self.token_ids: Ints = views.token_ids.numpy()
        self.positions: Ints = views.positions.numpy()
        self.slots: Longs = views.slots.numpy()
        self.places: Ints = views.places.numpy()
        self.blocks: Ints = views.blocks.numpy()
        self.work: list[Ints] = [work.numpy() for work in views.work]


def _mistaken(found: str, expected: str) -> HeadraceError:
    return HeadraceError(
        f"The step plan has {found}; expected {expected}.",
        "This is a mistake in Headrace: please report it.",
    )
