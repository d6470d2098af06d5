"""Plans as they go from the first rank to the others: only what these need to compute.

Followers draw nothing, so they get no parameters, no uniforms, no histories; of block tables they
get the entries that are new. Both sides remember the tables of as many sequences, and forget the
same ones, without telling each other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.core.step import Drafts, DrawParams, RowExtra, StepPlan

Known = TypeVar("Known")

_DRAWS = DrawParams(temperature=0.0)


@dataclass(slots=True, kw_only=True)
class SentPlan:
    sequence_ids: list[int]
    counts: list[int]
    starts: list[int]
    token_ids: list[int]
    versions: list[int]
    known: list[int]  # entries of each table that were sent before
    entries: list[list[int]]  # those behind them
    drawing: list[int]  # rows
    scored: list[int]  # rows with targets
    drafts: dict[int, int] = field(default_factory=dict)  # row -> how many
    copies: list[tuple[int, int]] = field(default_factory=list)


class _Remembered(OrderedDict[int, Known]):
    """Of a sequence's table, the latest used last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, sequence: int, known: Known) -> None:
        self[sequence] = known
        self.move_to_end(sequence)

    def forget(self) -> None:
        """Once a plan: a plan's own tables are all kept."""
        while len(self) > self._most:
            self.popitem(last=False)


class PlanWriter:
    def __init__(self, most_sequences: int) -> None:
        self._sent: _Remembered[tuple[int, int]] = _Remembered(4 * most_sequences)

    def write(self, plan: StepPlan) -> SentPlan:
        known, entries = [], []
        for sequence, version, table in zip(
            plan.sequence_ids, plan.versions, plan.tables, strict=True
        ):
            before, count = self._sent.get(sequence, (version, 0))
            count = count if before == version else 0
            known.append(count)
            entries.append(table[count:])
            self._sent.use(sequence, (version, len(table)))
        self._sent.forget()
        return SentPlan(
            sequence_ids=plan.sequence_ids,
            counts=plan.counts,
            starts=plan.starts,
            token_ids=plan.token_ids,
            versions=plan.versions,
            known=known,
            entries=entries,
            drawing=[row for row, draw in enumerate(plan.draws) if draw is not None],
            scored=[row for row, extra in plan.extras.items() if extra.targets is not None],
            drafts={row: len(drafts) for row, drafts in plan.drafts.items()},
            copies=plan.copies,
        )


class PlanReader:
    def __init__(self, most_sequences: int) -> None:
        self._tables: _Remembered[list[int]] = _Remembered(4 * most_sequences)

    def read(self, sent: SentPlan) -> StepPlan:
        tables = []
        for sequence, known, new in zip(sent.sequence_ids, sent.known, sent.entries, strict=True):
            table = self._tables[sequence] if known else []
            table += new
            self._tables.use(sequence, table)
            tables.append(table)
        self._tables.forget()
        drawing = set(sent.drawing)
        rows = range(len(sent.sequence_ids))
        return StepPlan(
            sequence_ids=sent.sequence_ids,
            counts=sent.counts,
            starts=sent.starts,
            token_ids=sent.token_ids,
            tables=tables,
            versions=sent.versions,
            draws=[_DRAWS if row in drawing else None for row in rows],
            uniforms=[0.0] * len(rows),
            extras={row: RowExtra(targets=[0] * sent.counts[row]) for row in sent.scored},
            drafts={row: Drafts(uniforms=[0.0] * count) for row, count in sent.drafts.items()},
            copies=sent.copies,
        )
