"""Block tables on the device: one row for each recently computed sequence.

The host keeps a copy, and only changes are sent: for a table with the same version as in the
previous step, the blocks that were added since (core/step.py says why that is enough). Everything
sent is checked, because kernels do not check that a block is in the pool. Knows neither tokens nor
what the blocks hold.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.shared.plan_check import mistaken, short_table
from headrace.core.errors import HeadraceError
from headrace.core.step import RunnerLimits, StepPlan

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
        # For each row: its table's version, and how many of its blocks were sent.
        self._versions = np.full(limits.max_sequences, -1, np.int64)
        self._lengths = np.zeros(limits.max_sequences, np.int64)

    def update(self, plan: StepPlan, ends: Longs) -> tuple[Ints, Ints, Ints]:
        """For a step that computes each sequence up to its position in `ends`: its rows in the
        tables, and what changed in them: indexes (flat) and block numbers."""
        try:
            rows = self._find_rows(plan.sequence_ids)
            return rows, *self._find_changes(rows, plan, ends)
        except HeadraceError:
            self._forget()
            raise

    def blocks(self, rows: Ints, at: Longs) -> Longs:
        """The block numbers at these columns of these rows."""
        return self._mirror[rows, at].astype(np.int64)

    def send(self, places: Ints, blocks: Ints) -> None:
        """Sends changes that do not fit into the step's copy (many new sequences with long tables),
        in a copy of their own before the step's first kernel."""
        sent = []
        for values in (places.astype(np.int64), blocks):
            tensor = torch.from_numpy(values)
            if self.on_device.is_cuda:
                tensor = tensor.pin_memory().to(self.on_device.device, non_blocking=True)
            sent.append(tensor)
        self.on_device.view(-1).index_copy_(0, sent[0], sent[1])

    def _find_changes(self, rows: Ints, plan: StepPlan, ends: Longs) -> tuple[Ints, Ints]:
        versions = np.array(plan.versions, np.int64)
        is_known = self._versions[rows] == versions
        had = np.where(is_known, self._lengths[rows], 0)
        needed = -(-ends // self._limits.block_tokens)
        longer = np.flatnonzero(needed > had).tolist()
        if not longer:
            return _NONE, _NONE
        places, blocks = [], []
        for at in longer:
            row, first, end = int(rows[at]), int(had[at]), int(needed[at])
            listed = plan.tables[at][first:end]
            if len(listed) < end - first:
                blocks_here = len(plan.tables[at])
                raise short_table(plan.sequence_ids[at], blocks_here, int(ends[at]), self._limits)
            self._check_blocks(listed)
            part = np.array(listed, np.int32)
            self._mirror[row, first:end] = part
            places.append(np.arange(first, end, dtype=np.int32) + row * self._width)
            blocks.append(part)
        self._versions[rows] = versions
        self._lengths[rows] = np.maximum(had, needed)
        return np.concatenate(places), np.concatenate(blocks)

    def _check_blocks(self, blocks: list[int]) -> None:
        if min(blocks) < 0 or max(blocks) >= self._limits.total_blocks:
            raise mistaken(
                "a block that is not in the pool", f"0 to {self._limits.total_blocks - 1}"
            )

    def _forget(self) -> None:
        """A plan was refused, perhaps half-way: every table is sent again."""
        self._rows.clear()
        self._free = list(range(self._limits.max_sequences - 1, -1, -1))
        self._versions[:] = -1

    def _find_rows(self, ids: list[int]) -> Ints:
        """The sequences' rows in the tables; a sequence without one gets one."""
        numbers = list(map(self._rows.get, ids, repeat(-1)))
        if min(numbers) < 0:
            numbers = [
                self._take_row(sequence_id, ids) if number < 0 else number
                for sequence_id, number in zip(ids, numbers, strict=True)
            ]
        return np.array(numbers, np.int32)

    def _take_row(self, sequence_id: int, ids: list[int]) -> int:
        if not self._free:
            here = set(ids)
            for other in [each for each in self._rows if each not in here]:
                self._free.append(self._rows.pop(other))
        row = self._free.pop()
        self._rows[sequence_id] = row
        self._versions[row] = -1
        return row
