"""Coefficients of engines.toml from measured rows: one base, factors of engines, GPU generations
and weight types, a robust loss in the logarithm, and a pull of every factor towards 1.

All rows are priced at once: the same functions that price one step are given columns (numpy arrays)
in place of numbers. Knows nothing of files; fit_silicon.py reads and writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.simulate.closed_loop import Loop, Waits, closed_loop_s
from headrace.simulate.engines import MOST, generation_of, weights_of
from headrace.simulate.roofline import Efficiencies, Peaks, step_times
from headrace.simulate.step_work import Span, StepWork
from planning.silicon_model import Case, family

Column = npt.NDArray[np.float64]

# Where the search begins, and what a coefficient is pulled to if no row tells otherwise.
BEGIN = {
    "memory": 0.7,
    "expert_memory": 0.6,
    "kv_memory": 0.6,
    "compute": 0.6,
    "expert_compute": 0.4,
    "attention_compute": 0.4,
    "link": 0.5,
    "spread": 0.8,
    "kernel_s": 3e-6,
    "expert_kernel_s": 3e-6,
    "exchange_s": 4e-6,
    "host_s": 1e-3,
    "row_s": 5e-6,
    "prompts": 2.0,
    "steps": 2.0,
    "first_wave": 0.1,
    "request_s": 0.03,
    "interrupted": 1.0,
}
ENGINES = ("vllm", "sglang", "trtllm")
# Which coefficients differ by what. Few: each has to hold for models that no row shows.
FACTORS = {
    "engine": (
        ENGINES,
        ("kernel_s", "compute", "prompts", "first_wave", "request_s", "interrupted"),
    ),
    "generation": (
        ("blackwell",),
        ("compute", "expert_compute", "expert_memory", "kv_memory"),
    ),
    "weights": (("bf16",), ("compute",)),
    "weights ": (("fp4",), ("expert_compute", "expert_memory")),
}
NAMES = [
    *((name, "", "") for name in BEGIN),
    *(
        (name, kind.strip(), value)
        for kind, (values, names) in FACTORS.items()
        for name in names
        for value in values
    ),
]
_SPANS = 2
_PULL, _BASE_PULL = 0.01, 0.002
_ROUND = 0.05  # below this, an error counts by its square
_FAR, _FAR_WEIGHT = 1.0, 0.2  # beyond a factor of e, an error counts little: rows can be wrong
_TTFT_WEIGHT = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cases as columns."""

    work: StepWork
    peaks: Peaks
    loop: Loop
    ttft_s: Column
    tpot_s: Column
    weights: Column  # of a row in the loss: models with many rows do not drown the others
    of_kind: dict[tuple[str, str], Column]  # 1 where a factor applies


def table_of(cases: Sequence[Case]) -> Table:
    counts = Counter(family(case.row.model) for case in cases)
    kinds = {
        "engine": [case.row.engine for case in cases],
        "generation": [generation_of(case.gpu) for case in cases],
        "weights": [weights_of(case.formats) for case in cases],
    }
    return Table(
        work=_stacked(StepWork, [case.work for case in cases]),
        peaks=_stacked(Peaks, [case.peaks for case in cases]),
        loop=_stacked(Loop, [case.loop for case in cases]),
        ttft_s=np.array([case.row.ttft_s for case in cases]),
        tpot_s=np.array([case.row.tpot_s for case in cases]),
        weights=np.array([counts[family(case.row.model)] ** -0.5 for case in cases]),
        of_kind={
            (kind, value): np.array([float(value == other) for other in kinds[kind]])
            for _, kind, value in NAMES
            if kind
        },
    )


def _stacked(kind: type[Any], parts: Sequence[Any]) -> Any:
    """One object whose fields are columns of the fields of many."""
    made: dict[str, Any] = {}
    for field in fields(kind):
        values = [getattr(part, field.name) for part in parts]
        first = values[0]
        if isinstance(first, str):
            made[field.name] = first  # names of types: used for peaks, which are already made
        elif isinstance(first, (tuple, list)):
            padded = [[*value, *_PADDING[: _SPANS - len(value)]] for value in values]
            if isinstance(first[0], Span):
                spans = ([_span(value[at]) for value in padded] for at in range(_SPANS))
                made[field.name] = tuple(_stacked(Span, span) for span in spans)
            else:
                made[field.name] = [
                    np.array([float(value[at] or 0.0) for value in padded]) for at in range(_SPANS)
                ]
        else:
            made[field.name] = np.array(values, dtype=np.float64)
    return kind(**made)


_PADDING: list[Any] = [None] * _SPANS


def _span(span: Span | None) -> Span:
    return span or Span(limit=np.inf, read_bytes=0.0, decode_flops=0.0, pair_flops=0.0)


def begin() -> Column:
    return np.log([BEGIN[name] if not kind else 1.0 for name, kind, _ in NAMES])


def predict(table: Table, at: Column) -> tuple[Column, Column]:
    """TTFT and TPOT of all rows."""
    values: dict[str, Any] = {}
    for (name, kind, value), log in zip(NAMES, at, strict=True):
        values[name] = values[name] + log * table.of_kind[kind, value] if kind else log
    values = {
        name: np.minimum(np.exp(log), MOST[name]) if name in MOST else np.exp(log)
        for name, log in values.items()
    }
    share = Efficiencies(**{field.name: values[field.name] for field in fields(Efficiencies)})
    waits = Waits(**{field.name: values[field.name] for field in fields(Waits)})
    ttft: Any
    tpot: Any
    ttft, tpot = closed_loop_s(step_times(table.work, table.peaks, share), table.loop, waits)
    return ttft, tpot


def fit(cases: Sequence[Case], rounds: int = 90) -> Column:
    """The coefficients' logarithms. Gradient descent with a step of its own for each coefficient
    (Adam), gradients by differences: there are few coefficients, and rows are priced at once."""
    table = table_of(cases)
    at = begin()
    mean, square = np.zeros_like(at), np.zeros_like(at)
    for step in range(1, rounds + 1):
        here = loss(table, at)
        slope = np.empty_like(at)
        for index in range(len(at)):
            moved = at.copy()
            moved[index] += 1e-3
            slope[index] = (loss(table, moved) - here) / 1e-3
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope**2
        rate = 0.03 * (1 + np.cos(np.pi * step / rounds)) + 0.002
        scale = np.sqrt(square / (1 - 0.99**step)) + 1e-8
        at = at - rate * mean / (1 - 0.9**step) / scale
    return at


def loss(table: Table, at: Column) -> float:
    """What is made small: errors of both times in the logarithm, and the pull."""
    ttft, tpot = predict(table, at)
    errors = _TTFT_WEIGHT * _counted(np.log(ttft / table.ttft_s))
    errors = errors + _counted(np.log(tpot / table.tpot_s))
    pull = np.where([kind != "" for _, kind, _ in NAMES], _PULL, _BASE_PULL)
    drawn = np.sum(pull * (at - begin()) ** 2)
    return float(np.sum(table.weights * errors) / np.sum(table.weights) + drawn)


def _counted(error: Column) -> Column:
    size = np.sqrt(error**2 + _ROUND**2) - _ROUND
    return np.where(size < _FAR, size, _FAR + _FAR_WEIGHT * (size - _FAR))
