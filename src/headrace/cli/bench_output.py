"""What `headrace bench` prints and writes: tables, plots, JSON, HTML and others' formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.bench.climb import Climbed
    from headrace.bench.efficiency import Efficiency
    from headrace.bench.session import Session
    from headrace.bench.summary import Summary
    from headrace.bench.sweep import Point
    from headrace.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    save: Path | None
    save_detailed: bool
    html: Path | None
    aiperf: Path | None
    mooncake: Path | None
    as_json: bool
    gpu: str | None
    gpu_model: str | None
    gpu_precision: str | None
    gpus: int


def check(outputs: Outputs) -> None:
    """Before minutes are spent: can all files be written, are GPU and model known?"""
    if outputs.save_detailed and outputs.save is None and not outputs.as_json:
        raise ConfigError("--save-detailed is given without --save.", "Add --save FILE.")
    for path in (outputs.save, outputs.html, outputs.mooncake, outputs.aiperf):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(
                f"{path} can't be written: there is no folder {path.absolute().parent}.",
                "Make it, or give another file.",
            )
    if outputs.gpu is not None:
        from headrace.bench.efficiency import peaks_of
        from headrace.hardware.gpus import find_gpu

        peaks_of(find_gpu(outputs.gpu), outputs.gpu_precision)
    if outputs.gpu_model is not None:
        from headrace.models.known import find_known

        find_known(outputs.gpu_model)


def write(
    session: Session,
    workload: Workload,
    summary: Summary,
    climbed: Climbed | None,
    outputs: Outputs,
) -> None:
    from headrace.bench.vllm_result import result

    about = about_run(session, workload)
    date = datetime.now(UTC)
    found = result(summary, about, date=date, detailed=outputs.save_detailed)
    used = _efficiency(session, summary, outputs)
    if used is not None:
        found["headrace"]["efficiency"] = {
            "mfu": used.mfu, "bandwidth_use": used.bandwidth_use, "flops": used.flops,
            "steps_estimated": used.steps, "source": used.source,
        }  # fmt: skip
    if climbed is not None:
        found["headrace"]["sweep"] = _sweep_facts(climbed)
    if session.asked.purse is not None:
        found["headrace"]["spent_usd"] = session.asked.purse.spent_usd
    if outputs.as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo("\n".join(_shown(session, summary, climbed, used)))
    try:  # what was measured is on the screen, whatever a disk does
        _write_files(session, summary, climbed, outputs, about, found, date)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} can't be written: {error.strerror}.", "Give another file."
        ) from None


def _write_files(
    session: Session,
    summary: Summary,
    climbed: Climbed | None,
    outputs: Outputs,
    about: dict[str, Any],
    found: dict[str, Any],
    date: datetime,
) -> None:
    if outputs.save is not None:
        outputs.save.write_text(json.dumps(found) + "\n", "utf-8")
    if outputs.html is not None:
        from headrace.bench.html import page

        text = page(
            summary,
            about,
            title=f"{about['model_id']} at {session.asked.address.url}",
            date=date.strftime("%Y-%m-%d %H:%M UTC"),
            bracket=None if climbed is None else climbed.bracket,
        )
        outputs.html.write_text(text, "utf-8")
    if outputs.aiperf is not None:
        from headrace.bench.aiperf import write_records, write_table

        outputs.aiperf.mkdir(exist_ok=True)
        records = outputs.aiperf / "profile_export.jsonl"
        write_records(summary, records, began_unix_s=summary.began_unix_s)
        with (outputs.aiperf / "profile_export_aiperf.csv").open("w", newline="") as file:
            write_table(summary, file)
    if outputs.mooncake is not None:
        from headrace.bench.observed import observed_asks
        from headrace.workload.trace import write_mooncake

        write_mooncake(observed_asks(summary.records), outputs.mooncake)


def _shown(
    session: Session, summary: Summary, climbed: Climbed | None, used: Efficiency | None
) -> Iterator[str]:
    from headrace.bench import plot
    from headrace.bench.table import lines

    target = session.target
    assert target is not None
    yield f"endpoint     {session.asked.address.url}{session.asked.path}, {target.model}"
    if climbed is not None:
        yield f"edge         {_edge(climbed)} {climbed.bracket}"
        yield f"shown        the run at {climbed.best.rate_s:.3g} requests/s"
        if climbed.ended_by:
            yield f"ended early  {climbed.ended_by}"
    yield from lines(summary)
    if used is not None:
        bandwidth = "" if used.bandwidth_use is None else f", about {used.bandwidth_use:.1%} of "
        bandwidth += "" if used.bandwidth_use is None else "its bandwidth"
        yield f"GPU          {used.mfu:.1%} of its operations (MFU){bandwidth}"
        yield f"             {used.source}"
    if session.asked.purse is not None:
        yield f"spent        {session.asked.purse.spent_usd:.4f} USD"
    if sys.stdout.isatty():
        yield ""
        yield from plot.lines(summary)


def _edge(climbed: Climbed) -> str:
    """What ends there: by the lowest rate that was too much, where there is one."""
    bracket = climbed.bracket
    above = next((point for point in bracket.points if point.rate_s == bracket.high_s), None)
    if climbed.held is not None or (above is not None and above.only_missed):
        return "the objective is met up to a rate"
    return "saturated" if above is None or above.is_saturated else "requests fail"


def point_line(point: Point) -> str:
    """One line for each rate, as it is tried."""
    spread = point.summary.spreads["ttft"]
    ttft = "no answer" if spread is None else f"TTFT {spread.median * 1e3:,.0f} ms"
    word = f"{point.summary.failed} of {len(point.summary.records)} requests failed"
    if point.is_kept or point.is_saturated:
        word = "kept" if point.is_kept else "saturated"
    elif point.only_missed:
        word = "objective not met"
    return (
        f"{point.rate_s:8.3g} requests/s  {point.summary.output_tokens_s:9,.1f} tokens/s  "
        f"{ttft:<16} {word}"
    )


def _sweep_facts(climbed: Climbed) -> dict[str, Any]:
    def facts(point: Point) -> dict[str, Any]:
        spread = point.summary.spreads["ttft"]
        return {
            "rate": point.rate_s,
            "output_throughput": point.summary.output_tokens_s,
            "median_ttft_s": None if spread is None else spread.median,
            "met_share": point.summary.met_share,
            "failed": point.summary.failed,
            "is_saturated": point.is_saturated,
            "is_kept": point.is_kept,
        }

    return {
        "low": climbed.bracket.low_s,
        "high": climbed.bracket.high_s,
        "points": [facts(point) for point in climbed.bracket.points],
        "held": None if climbed.held is None else facts(climbed.held),
        "ended_by": climbed.ended_by,
    }


def about_run(session: Session, workload: Workload) -> dict[str, Any]:
    """As vLLM names it: request_rate is "inf" in a closed loop."""
    from headrace.bench.feed import clients_of
    from headrace.workload.arrivals import OpenLoop
    from headrace.workload.workload import Synthetic

    asked, target = session.asked, session.target
    assert target is not None
    kind = "openai-chat" if asked.path.endswith("chat/completions") else "openai"
    arrivals = workload.arrivals if isinstance(workload, Synthetic) else None
    loop = arrivals if isinstance(arrivals, OpenLoop) else None
    return {
        "backend": kind,
        "endpoint_type": kind,
        "model_id": target.model,
        "request_rate": "inf" if loop is None else loop.rate_s,
        "burstiness": 1 / loop.cv**2 if loop is not None and loop.cv > 1e-3 else 1.0,
        "max_concurrency": clients_of(workload) or asked.most_at_once,
        "workload": workload.name,
        "seed": asked.seed,
        "salt": asked.salt,
    }


def _efficiency(session: Session, summary: Summary, outputs: Outputs) -> Efficiency | None:
    if outputs.gpu is None:
        return None
    from headrace.bench.efficiency import efficiency
    from headrace.hardware.gpus import find_gpu
    from headrace.models.known import find_known

    assert session.target is not None
    try:
        known = find_known(outputs.gpu_model or session.target.model)
    except HeadraceError as error:
        if outputs.gpu_model is not None:
            raise
        typer.echo(f"No MFU: {error.cause} --gpu-model gives its name.", err=True)
        return None
    return efficiency(
        summary,
        known.spec,
        find_gpu(outputs.gpu),
        precision=outputs.gpu_precision or known.precision,
        gpus=outputs.gpus,
    )
