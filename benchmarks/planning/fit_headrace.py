"""Fit this engine's own coefficients to its figures on one H200 (docs/gpu.md, "Figures").

    PYTHONPATH=benchmarks python -m planning.fit_headrace

Those are steps of one kind, timed alone: no server, no queue. So only shares and times of a step
follow from them; how first tokens wait is what the scheduler does, which the simulator runs. The
factors go into [engine.headrace] and the spread of the 18 figures into [band.headrace] of
src/headrace/simulate/engines.toml.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache

import numpy as np

from headrace.hardware.gpus import find_gpu
from headrace.models.known import find_known
from headrace.simulate.engines import MOST, weights_of
from headrace.simulate.roofline import Efficiencies, Peaks, peaks_of, step_times
from headrace.simulate.step_work import Format, Formats, Layout, StepWork, step_work
from planning.fit_silicon import ENGINES_FILE, put_values
from planning.silicon_model import BF16, FP8

INT4 = Format(value_bytes=0.5 + 2 / 128)  # a 16-bit scale for 128 values
FITTED = ("memory", "kv_memory", "compute", "attention_compute", "kernel_s", "host_s", "row_s")


@dataclass(frozen=True, slots=True)
class Figure:
    """A step of `rows` sequences that compute `tokens` each after `start`."""

    kept: Format
    rows: int
    start: int
    tokens: int
    ms: float


FIGURES = (
    *(
        Figure(BF16, rows, 128, 1, ms)
        for rows, ms in zip(
            (1, 8, 32, 64, 128, 256, 512), (3.99, 4.22, 4.55, 5.03, 6.09, 8.82, 15.8), strict=True
        )
    ),
    *(
        Figure(FP8, rows, 128, 1, ms)
        for rows, ms in zip((1, 8, 64, 256), (2.55, 2.76, 3.46, 6.29), strict=True)
    ),
    *(
        Figure(INT4, rows, 128, 1, ms)
        for rows, ms in zip((1, 8, 64), (2.34, 2.55, 4.20), strict=True)
    ),
    Figure(BF16, 16, 8192, 1, 8.14),
    *(
        Figure(BF16, 1, 0, tokens, ms)
        for tokens, ms in zip((512, 2048, 8192), (12.2, 48.1, 224.0), strict=True)
    ),
)


def main() -> None:
    text = ENGINES_FILE.read_text()
    data = tomllib.loads(text)
    draw = random.Random(15)
    best = dict.fromkeys(FITTED, 1.0)
    error = _error(data, best)
    for attempt in range(20_000):
        width = 0.5 * (1 - attempt / 20_000) + 0.005
        name = draw.choice(FITTED)
        tried = best | {name: best[name] * float(np.exp(draw.gauss(0, width)))}
        here = _error(data, tried)
        if here < error:
            best, error = tried, here
    ratios = [figure.ms / 1e3 / _seconds(data, best, figure) for figure in FIGURES]
    low, high = min(ratios), max(ratios)
    bands = {"headrace": {"ttft": (low, high), "tpot": (low, high)}}
    values = {(name, "engine", "headrace"): factor for name, factor in best.items()}
    ENGINES_FILE.write_text(put_values(text, values, bands))


def _error(data: Mapping[str, dict[str, dict[str, float]]], own: Mapping[str, float]) -> float:
    logs = [np.log(_seconds(data, own, figure) * 1e3 / figure.ms) for figure in FIGURES]
    pulled = 0.02 * sum(np.log(factor) ** 2 for factor in own.values())
    return float(np.sum(np.abs(logs)) + pulled)


def _seconds(
    data: Mapping[str, dict[str, dict[str, float]]], own: Mapping[str, float], figure: Figure
) -> float:
    formats = Formats(attention=figure.kept, mlp=figure.kept, experts=figure.kept)
    weights = data["weights"][weights_of(formats)]
    values: dict[str, float] = {}
    for field in fields(Efficiencies):
        name = field.name
        base = float(data["base"][name])  # type: ignore[arg-type]
        value = base * own.get(name, 1.0) * weights.get(name, 1.0)
        values[name] = min(value, MOST.get(name, value))
    work, peaks = _work(formats)
    times = step_times(work, peaks, Efficiencies(**values))
    tokens = figure.rows * figure.tokens
    seen = float(figure.rows * (figure.start + figure.tokens))
    if figure.tokens == 1:
        return times.step_s(tokens, figure.rows, decoding=(seen,), reading=(0.0,), pairs=(0.0,))
    pairs = figure.tokens * (figure.tokens + 1) / 2
    return times.step_s(tokens, 1, decoding=(0.0,), reading=(seen,), pairs=(pairs,))


@cache
def _work(formats: Formats) -> tuple[StepWork, Peaks]:
    work = step_work(find_known("llama-3.1-8b").spec, formats, Layout())
    return work, peaks_of(find_gpu("h200-sxm"), work)


if __name__ == "__main__":
    main()
