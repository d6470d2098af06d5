"""Block tables on the device, a row for each sequence that was computed lately.

The host keeps a copy, and only changes are sent: a table whose list is the one of the step before,
continued where that ended, can differ only from the block of its first new token on. Whatever is
sent is checked: a kernel must not meet a block that is not in the pool. Knows neither tokens nor
what the blocks hold.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError
from headrace.core.step import RunnerLimits

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_NONE: Ints = np.empty(0, np.int32)


class BlockTables:
    def __init__(self, limits: RunnerLimits, device: torch.device) -> None:
        self._limits = limits
        self._width = -(-limits.context_tokens // limits.block_tokens)
        shape = (limits.max_sequences, self._width)
        self.on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._mirror = np.zeros(shape, np.int32)
        self._rows: dict[int, int] = {}  # sequence -> its row of the tables
        self._free = list(range(limits.max_sequences - 1, -1, -1))
        # Of each row: the position after the last computed one, and the very list that its table
        # came from, held so that no other can take its identity.
        self._ends = np.full(limits.max_sequences, -1, np.int64)
        self._held: list[list[int] | None] = [None] * limits.max_sequences

    def update(
        self, ids: list[int], tables: list[list[int]], starts: Longs, counts: Longs
    ) -> tuple[Ints, Ints, Ints]:
        """For a step that computes `counts` tokens of each sequence from `starts` on: its rows of
        the tables, and what changed in these: places (flat) and block numbers."""
        try:
            rows = self._find_rows(ids)
            return rows, *self._find_changes(rows, tables, starts, counts)
        except HeadraceError:
            self._forget()
            raise

    def blocks(self, rows: Ints, at: Longs) -> Longs:
        """The numbers of the blocks at these places of these rows."""
        return self._mirror[rows, at].astype(np.int64)

    def send(self, places: Ints, blocks: Ints) -> None:
        """Changes that go by themselves, after the step's copy and before its first kernel: more
        than that has room for, of sequences that are all new, with long tables."""
        sent = []
        for values in (places.astype(np.int64), blocks):
            tensor = torch.from_numpy(values)
            if self.on_device.is_cuda:
                tensor = tensor.pin_memory().to(self.on_device.device, non_blocking=True)
            sent.append(tensor)
        self.on_device.view(-1).index_copy_(0, sent[0], sent[1])

    def _find_changes(
        self, table_rows: Ints, tables: list[list[int]], starts: Longs, counts: Longs
    ) -> tuple[Ints, Ints]:
        size, limits = self._limits.block_tokens, self._limits
        ends = starts + counts
        if ends.max() > limits.context_tokens or starts.min() < 0:
            raise mistaken("positions past the context", f"at most {limits.context_tokens}")
        first, last = starts // size, (ends - 1) // size
        first[self._find_whole(table_rows, tables, starts)] = 0
        self._ends[table_rows] = ends
        try:
            new = [table[at] for table, at in zip(tables, first.tolist(), strict=True)]
        except IndexError:
            raise mistaken(
                "a block table that is too short", "one that covers its tokens"
            ) from None
        self._check_blocks(new)
        blocks = np.array(new, np.int32)
        changed = np.flatnonzero(self._mirror[table_rows, first] != blocks)
        longer = np.flatnonzero(last > first)
        if not len(changed) and not len(longer):
            return _NONE, _NONE
        self._mirror[table_rows, first] = blocks
        places = [table_rows[changed] * self._width + first[changed]]
        values = [blocks[changed]]
        for at in longer.tolist():
            begin, end = int(first[at]) + 1, int(last[at]) + 1
            listed = tables[at][begin:end]
            if len(listed) != end - begin:
                raise mistaken("a block table that is too short", "one that covers its tokens")
            self._check_blocks(listed)
            part = np.array(listed, np.int32)
            row_at = int(table_rows[at])
            self._mirror[row_at, begin:end] = part
            places.append(np.arange(begin, end) + row_at * self._width)
            values.append(part)
        return np.concatenate(places).astype(np.int32), np.concatenate(values)

    def _check_blocks(self, blocks: list[int]) -> None:
        if min(blocks) < 0 or max(blocks) >= self._limits.total_blocks:
            raise mistaken(
                "a block that is not in the pool", f"0 to {self._limits.total_blocks - 1}"
            )

    def _forget(self) -> None:
        """A plan was refused, perhaps half-way: every table is sent anew."""
        self._rows.clear()
        self._free = list(range(self._limits.max_sequences - 1, -1, -1))
        self._ends[:] = -1
        self._mirror[:] = -1

    def _find_rows(self, ids: list[int]) -> Ints:
        """The sequences' rows of the tables; whoever has none is given one."""
        numbers = list(map(self._rows.get, ids, repeat(-1)))
        if min(numbers) < 0:
            numbers = [
                self._take_row(sequence_id, ids) if number < 0 else number
                for sequence_id, number in zip(ids, numbers, strict=True)
            ]
        return np.array(numbers, np.int32)

    def _find_whole(self, table_rows: Ints, tables: list[list[int]], starts: Longs) -> Longs:
        """Entries whose tables are another list than before, or go on somewhere else: these are
        sent from their beginning on."""
        held, numbers = self._held, table_rows.tolist()
        same = [held[row] is table for row, table in zip(numbers, tables, strict=True)]
        changed = self._ends[table_rows] != starts
        if not all(same):
            changed |= ~np.array(same)
            for row, table in zip(numbers, tables, strict=True):
                held[row] = table
        return np.flatnonzero(changed)

    def _take_row(self, sequence_id: int, ids: list[int]) -> int:
        if not self._free:
            here = set(ids)
            for other in [each for each in self._rows if each not in here]:
                self._free.append(self._rows.pop(other))
        row = self._free.pop()
        self._rows[sequence_id] = row
        self._ends[row] = -1
        return row


def mistaken(found: str, expected: str) -> HeadraceError:
    return HeadraceError(
        f"The step plan has {found}; expected {expected}.",
        "This is a mistake in Headrace: please report it.",
    )
