"""A profile of steps for a person: tables of operations, of a GPU's kernels and groups of them.

Knows calibrate/step_profile.py's values; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from headrace.cli.tables import show_table

if TYPE_CHECKING:
    from headrace.calibrate.step_profile import Operation, Peaks, StepProfile

_NAME_WIDTH = 34
_TERA = 10e12  # from this rate on, rates are in TFLOP/s
_SHOWN_KERNELS = 3  # of one operation


def show_profile(
    model: str,
    weight_bytes: int,
    peaks: Peaks | None,
    sheet: str | None,
    steps: Sequence[StepProfile],
) -> None:
    typer.echo(f"{model}, {weight_bytes / 1e6:,.0f} MB of weights")
    unit, factor = "GFLOP/s", 1e9
    if peaks is not None:
        if max(peaks.flops_s.values(), default=0.0) >= _TERA:
            unit, factor = "TFLOP/s", 1e12
        rates = ", ".join(f"{rate / factor:,.0f} {name}" for name, rate in peaks.flops_s.items())
        typer.echo(f"peaks: {rates} {unit}; {peaks.bytes_s / 1e9:,.1f} GB/s; {peaks.source}")
    if sheet is not None:
        typer.echo(sheet)
    for step in steps:
        _show_step(step, weight_bytes, unit, factor)


def explained(*, is_gpu: bool) -> Iterator[str]:
    yield ""
    yield "BEST, MEDIAN  of all rounds; noise only adds time, so the best is nearest to the machine"
    if is_gpu:
        yield "seconds       of a kernel: from the end of the one before it, or its own begin, to"
        yield "              its end; with dependent launches it may begin before"
        yield "FLOP/S        2 × multiply-adds / best;  GB/S: weights, KV blocks, rows / best"
    else:
        yield "BUSY          time that threads worked / (threads × time until the last was done)"
        yield "FLOP/S        2 × multiply-adds / best;  GB/S: weights or KV blocks read / best"
    yield "OF PEAK       max(FLOPs / peak rate of the type, bytes / bandwidth) / best"
    yield "outside       a whole step minus its operations: plan to arrays, launches, results"
    yield "in the engine steps that the engine makes one after the other; the host's part is what"
    yield "              it does not spend computing, or waiting for the GPU"


def _show_step(step: StepProfile, weight_bytes: int, unit: str, factor: float) -> None:
    typer.echo(
        f"\n{step.name}\n{step.best_s * 1e3:.2f} ms at best, {step.median_s * 1e3:.2f} in the "
        f"median; {step.tokens_s:,.0f} tokens/s, weights at "
        f"{weight_bytes / step.best_s / 1e9:,.1f} GB/s"
    )
    if step.note is not None:
        typer.echo(f"note: {step.note}")
    if step.operations:
        _show_operations(step, unit, factor)
    share = step.outside_s / step.median_s
    typer.echo(f"outside the operations: {step.outside_s * 1e6:,.0f} µs, {share:.1%} of a step")
    if step.submit_s is not None:
        typer.echo(f"the host's part of a step: {step.submit_s * 1e6:,.0f} µs")
    if step.engine is not None:
        typer.echo(
            f"in the engine: {step.engine.step_s * 1e3:.2f} ms a step, "
            f"{step.engine.host_s * 1e6:,.0f} µs of it the host's"
        )


def _show_operations(step: StepProfile, unit: str, factor: float) -> None:
    known_s = sum(each.seconds for each in step.operations)
    groups = step.groups()
    if groups:
        rows = [
            (name, f"{calls:,}", f"{seconds * 1e3:.3f}", f"{seconds / known_s:.1%}")
            for name, (calls, seconds) in groups.items()
        ]
        show_table(("GROUP", "KERNELS", "MS", "SHARE"), rows)
        typer.echo("")
    heading = ["OPERATION", "CALLS", "BEST MS", "MEDIAN", "SHARE"]
    heading += [] if groups else ["BUSY"]
    heading += [unit.upper(), "GB/S", "OF PEAK"]
    table = []
    for each in step.operations:
        table.append(_row(each, known_s, factor, has_busy=not groups))
        table += _kernel_rows(each, known_s, len(heading))
    show_table(heading, table)


def _row(each: Operation, whole_s: float, factor: float, *, has_busy: bool) -> list[str]:
    def rate(amount: float | None, of: float) -> str:
        return "" if amount is None or not each.seconds else f"{amount / each.seconds / of:,.1f}"

    busy = "" if each.busy_share is None else f"{each.busy_share:.0%}"
    return [
        _short(each.name, _NAME_WIDTH),
        f"{each.calls:,}",
        f"{each.seconds * 1e3:.3f}",
        f"{each.median_s * 1e3:.3f}",
        f"{each.seconds / whole_s:.1%}",
        *([busy] if has_busy else []),
        rate(each.flops, factor),
        rate(each.bytes, 1e9),
        "" if each.of_peak is None else f"{each.of_peak:.0%}",
    ]


def _kernel_rows(each: Operation, whole_s: float, width: int) -> Iterator[list[str]]:
    """The kernels of an operation, unless the only one has its name."""
    if len(each.kernels) < 2 and (not each.kernels or each.kernels[0].name == each.name):
        return
    for kernel in each.kernels[:_SHOWN_KERNELS]:
        cells = [
            "  " + _short(kernel.name, _NAME_WIDTH - 2),
            f"{kernel.calls:,}",
            f"{kernel.seconds * 1e3:.3f}",
            "",
            f"{kernel.seconds / whole_s:.1%}",
        ]
        yield cells + [""] * (width - len(cells))


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
