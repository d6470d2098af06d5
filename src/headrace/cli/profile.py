"""`headrace profile`: where a step's time goes: a model's, by operation, or a running server's.

Reads flags and prints; calibrate/operations.py measures, a server's own history tells the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, Offline
from headrace.cli.tables import show_table
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.backends.cpu.runner import CpuRunner
    from headrace.calibrate.operations import Operation, Peaks, StepProfile

SCHEMA = "headrace-profile-step/1"
_URL = re.compile(r"https?://|:\d+$|[\w.-]+:\d+(/|$)|localhost")
_NAME_WIDTH = 34
PREFILL_ROWS = 128  # so many rows or more are one prompt


def profile(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[URL|MODEL]", help="A server that runs, or a model to load."),
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option(help="Rows of a step; 128 or more: one prompt. May be given several times."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens before decoded ones.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Of each step; the best counts.", min=1)] = 10,
    device: Annotated[Device, typer.Option(help="What computes, as for serve.")] = Device.AUTO,
    threads: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Peaks that `headrace calibrate` measured.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write a Chrome trace there (ui.perfetto.dev).")
    ] = None,
    window: Annotated[str, typer.Option(help="Of a server's history: 5m, 1h or 24h.")] = "5m",
    key_variable: Annotated[
        str | None, typer.Option(help="The variable that holds the operator's key.")
    ] = None,
    offline: Offline = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what the numbers mean.")] = False,
    as_json: AsJson = False,
) -> None:
    """Where a step's time goes, operation by operation, against what the machine can do."""
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace is {trace}; its folder does not exist.", "Create it first.")
    if target is not None and _URL.match(target) and not Path(target).exists():
        from headrace.cli.profile_server import profile_server

        profile_server(target, window, key_variable, trace=trace, explain=explain, as_json=as_json)
        return
    from headrace.calibrate.operations import profile_steps, trace_of
    from headrace.calibrate.steps import needed_tokens

    points = _points(rows or [1, 16, 512], context)
    config = EngineConfig(
        device=device,
        threads=threads,
        kv_tokens=needed_tokens(points, 64),
        max_batch_tokens=max(512, *(point.batch_tokens for point in points)),
        max_sequences=max(2, *(point.decode_rows for point in points)),
    )
    from headrace.assemble import assemble
    from headrace.backends.cpu.runner import CpuRunner
    from headrace.backends.registry import choose_backend

    backend = choose_backend(config)
    if backend.name is not Device.CPU:
        raise ConfigError(
            f"headrace profile times operations on a CPU; this would run on {backend.name}.",
            "Use --device cpu. For a GPU there is Nsight Systems: nsys profile headrace serve.",
        )
    loaded = assemble(target, config=config, offline=offline)
    try:
        runner = loaded.runner
        assert isinstance(runner, CpuRunner)
        peaks = _peaks(runner, profile)
        found = profile_steps(runner, loaded.spec.vocab_size, points, rounds, peaks)
        name, weight_bytes = loaded.model_path.name, loaded.ledger.weights_bytes
    finally:
        loaded.close()
    if trace is not None:
        trace.write_text(json.dumps(trace_of(found)) + "\n")
    if as_json:
        typer.echo(json.dumps(_facts(name, peaks, found), indent=2))
        return
    typer.echo(f"{name}, {weight_bytes / 1e6:,.0f} MB of weights")
    typer.echo(
        f"peaks: {peaks.flops_s / 1e9:,.0f} GFLOP/s (float32: "
        f"{peaks.float_flops_s / 1e9:,.0f}), {peaks.bytes_s / 1e9:,.1f} GB/s, {peaks.source}"
    )
    for step in found:
        _show(step, weight_bytes)
    if explain:
        typer.echo("\n".join(_explained()))
    if trace is not None:
        typer.echo(f"\ntrace written to {trace}")


def _points(rows: list[int], context: int) -> list[Any]:
    from headrace.calibrate.steps import Point

    if min(rows) < 1 or max(rows) > 65_536:
        raise ConfigError(f"--rows is {rows}; expected 1 to 65536.", "Give others.")
    return [
        Point(prompt_tokens=count)
        if count >= PREFILL_ROWS
        else Point(decode_rows=count, context_tokens=context)
        for count in rows
    ]


def _peaks(runner: CpuRunner, profile: Path | None) -> Peaks:
    """From a profile, else measured now."""
    from headrace.calibrate.operations import Peaks, cpu_peaks
    from headrace.hardware.profile import load_profile

    if profile is None:
        return cpu_peaks(runner)
    ceilings = load_profile(profile).ceilings
    if ceilings is None:
        raise ConfigError(f"{profile} has no ceilings.", "Leave --profile out.")
    return Peaks(
        flops_s=2 * ceilings.multiplies_s["int8"],
        float_flops_s=2 * ceilings.multiplies_s["fp32"],
        bytes_s=max(ceilings.read_bytes_s.values()),
        source=f"of {profile}",
    )


def _show(step: StepProfile, weight_bytes: int) -> None:
    from headrace.calibrate.operations import name_of

    known_s = sum(each.seconds for each in step.operations)
    typer.echo(
        f"\n{name_of(step.point)}: {step.best_s * 1e3:.2f} ms at best, {step.median_s * 1e3:.2f} "
        f"in the median; {step.tokens_s:,.0f} tokens/s, weights at "
        f"{weight_bytes / step.best_s / 1e9:,.1f} GB/s"
    )
    show_table(
        ("OPERATION", "CALLS", "BEST MS", "MEDIAN", "SHARE", "BUSY", "GFLOP/S", "GB/S", "OF PEAK"),
        [_row(each, known_s) for each in step.operations],
    )
    share = step.outside_s / step.median_s
    typer.echo(f"outside the operations: {step.outside_s * 1e6:,.0f} µs, {share:.1%} of a step")


def _row(each: Operation, whole_s: float) -> tuple[str, ...]:
    def rate(amount: float | None) -> str:
        return "" if amount is None or not each.seconds else f"{amount / each.seconds / 1e9:,.1f}"

    name = each.name if len(each.name) <= _NAME_WIDTH else each.name[: _NAME_WIDTH - 1] + "…"
    return (
        name,
        f"{each.calls:,}",
        f"{each.seconds * 1e3:.3f}",
        f"{each.median_s * 1e3:.3f}",
        f"{each.seconds / whole_s:.1%}",
        "" if each.busy_share is None else f"{each.busy_share:.0%}",
        rate(each.flops),
        rate(each.bytes),
        "" if each.of_peak is None else f"{each.of_peak:.0%}",
    )


def _facts(name: str, peaks: Peaks, found: list[StepProfile]) -> dict[str, Any]:
    steps = []
    for step in found:
        facts = asdict(step)
        facts["tokens_s"] = step.tokens_s
        for made, each in zip(facts["operations"], step.operations, strict=True):
            made["of_peak"] = each.of_peak
        steps.append(facts)
    return {
        "schema": SCHEMA,
        "model": name,
        "peaks": asdict(peaks),
        "steps": steps,
    }


def _explained() -> Iterator[str]:
    yield ""
    yield "BEST, MEDIAN  of all rounds; noise only adds time, so the best is nearest to the machine"
    yield "BUSY          time that threads worked / (threads × time until the last was done)"
    yield "GFLOP/S       2 × multiply-adds / best;  GB/S: weights or KV blocks read / best"
    yield "OF PEAK       max(multiply-adds / peak rate, bytes / bandwidth) / best"
    yield "outside       a whole step minus its operations: plan to arrays, threads, results"
