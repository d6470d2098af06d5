"""The table of draw parameters: every number that decides which token is drawn, declared once.

A row is a field of `DrawFields`: its name, type, default, bounds, one sentence of meaning, who may
send it, whether a model's files may give its default, and the column in which backends get it. The
server's structs, OpenAPI, the flags of `headrace run` and `chat`, docs/api.md, the checks and what
a step is told are all made from the rows. What a parameter does to a distribution is said once, in
backends/reference/sampling.py. Knows no request, model or backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum, Flag, auto
from operator import attrgetter
from typing import Any

from headrace.core.checks import MAX_COUNT, metadata_of, within

ROW = "row"  # in a field's metadata


class Taken(Flag):
    """Who may send a parameter under its name."""

    COMPLETIONS = auto()  # chat and plain completions
    RESPONSES = auto()
    MESSAGES = auto()
    COMMANDS = auto()  # `headrace run` and `headrace chat`
    APIS = COMPLETIONS | RESPONSES | MESSAGES
    EVERYWHERE = APIS | COMMANDS


class Column(Enum):
    """Which of a backend's two lists of numbers a parameter is in; both in the table's order."""

    FILTER = auto()  # temperature, and what keeps the likeliest tokens
    PENALTY = auto()  # what depends on the tokens so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    help: str  # a sentence for --help, OpenAPI and docs/api.md
    taken: Taken
    column: Column | None = None
    gguf_key: str = ""  # where a GGUF file's header has the model's default


def row(
    help: str, taken: Taken, column: Column | None = None, *, gguf_key: str = ""
) -> dict[str, Any]:
    """Metadata of a field that is a sampling parameter."""
    return {ROW: Row(help=help, taken=taken, column=column, gguf_key=gguf_key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawFields:
    """The table. None means the model's default for that parameter."""

    temperature: float | None = field(
        default=None,
        metadata=row(
            "Divides the logits: higher is more varied, 0 is greedy.",
            Taken.EVERYWHERE,
            Column.FILTER,
            gguf_key="general.sampling.temp",
        )
        | within(at_least=0, meaning="greedy"),
    )
    top_p: float | None = field(
        default=None,
        metadata=row(
            "Keep the likeliest tokens, up to this probability together.",
            Taken.EVERYWHERE,
            Column.FILTER,
            gguf_key="general.sampling.top_p",
        )
        | within(above=0, at_most=1),
    )
    min_p: float = field(
        default=0.0,
        metadata=row(
            "Drop tokens that are less likely than this times the likeliest.",
            Taken.EVERYWHERE,
            Column.FILTER,
        )
        | within(at_least=0, at_most=1),
    )
    typical_p: float = field(
        default=1.0,
        metadata=row(
            "Keep the tokens nearest to the expected surprise, up to this probability together.",
            Taken.COMPLETIONS,
            Column.FILTER,
        )
        | within(above=0, at_most=1),
    )
    top_k: int | None = field(
        default=None,
        metadata=row(
            "Keep the k likeliest tokens; 0 or -1 keeps all.",
            Taken.EVERYWHERE,
            Column.FILTER,
            gguf_key="general.sampling.top_k",
        )
        | within(at_least=-1, at_most=MAX_COUNT),
    )
    repetition_penalty: float | None = field(
        default=None,
        metadata=row(
            "Above 1 discourages tokens of the prompt and the answer so far.",
            Taken.EVERYWHERE,
            Column.PENALTY,
            gguf_key="general.sampling.penalty_repeat",
        )
        | within(above=0, at_most=100),
    )
    presence_penalty: float = field(
        default=0.0,
        metadata=row(
            "Subtracted from the logits of tokens that the answer has.",
            Taken.COMPLETIONS,
            Column.PENALTY,
        )
        | within(at_least=-2, at_most=2),
    )
    frequency_penalty: float = field(
        default=0.0,
        metadata=row(
            "Subtracted from the logits of tokens as often as the answer has them.",
            Taken.COMPLETIONS,
            Column.PENALTY,
        )
        | within(at_least=-2, at_most=2),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawNumbers(DrawFields):
    """A value for every row: what a step gets, and what a model's files may set. Not checked when
    made: see `check_fields`. The defaults are the neutral values: temperature 1 over all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


NEUTRAL = DrawNumbers()
# The parameters whose default a model's files may set.
MODEL_DEFAULTS = tuple(each.name for each in fields(DrawFields) if each.default is None)


def rows_of(owner: type, taken: Taken | None = None) -> Iterator[tuple[str, Row]]:
    """The fields of a dataclass that are rows, in order: all, or those that `taken` may send."""
    for each in fields(owner):
        found: Row | None = metadata_of(owner, each.name).get(ROW)
        if found is not None and (taken is None or found.taken & taken):
            yield each.name, found


def _names(column: Column) -> tuple[str, ...]:
    return tuple(name for name, each in rows_of(DrawFields) if each.column is column)


FILTERS, PENALTIES = _names(Column.FILTER), _names(Column.PENALTY)
# The numbers of a column, as a tuple in the table's order.
filters_of, penalties_of = attrgetter(*FILTERS), attrgetter(*PENALTIES)


def model_defaults(numbers: DrawNumbers) -> dict[str, float]:
    return {name: getattr(numbers, name) for name in MODEL_DEFAULTS}
