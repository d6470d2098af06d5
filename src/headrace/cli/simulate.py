"""`headrace simulate`: a workload on a machine that was calibrated, on a virtual clock.

Reads options and shows a report; simulate/ has the engine on a virtual clock, workload/ the
requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.calibrate import DEFAULT_OUT
from headrace.cli.options import AsJson
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.hardware.profile import Profile
    from headrace.simulate.replica import Setup
    from headrace.simulate.report import Percentiles, Report
    from headrace.workload.slo import Slo
    from headrace.workload.workload import Workload

MOST_REQUESTS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options, before they are checked."""

    workload: str | None
    trace: Path | None
    input: str | None
    output: str | None
    arrivals: str | None
    rate: float | None


def simulate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="The model that the profile must be of; default: any."
        ),
    ] = None,
    profile: Annotated[
        Path, typer.Option("--profile", help="What headrace calibrate wrote.")
    ] = DEFAULT_OUT,
    workload: Annotated[
        str | None, typer.Option(help="chat, rag, code, batch or agent: docs/workload.md.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded requests: CSV or Mooncake.")] = None,
    input_lengths: Annotated[
        str | None, typer.Option("--input", help="Prompt tokens: 512, lognormal:512,0.8, ...")
    ] = None,
    output_lengths: Annotated[
        str | None, typer.Option("--output", help="Tokens of answers, written as --input.")
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="constant, poisson, gamma:CV or closed:CLIENTS.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second.")] = None,
    requests: Annotated[int | None, typer.Option(help="How many; default: 300.")] = None,
    slo: Annotated[str | None, typer.Option(help="Such as ttft=500ms,tpot=50ms,share=99%.")] = None,
    saturation: Annotated[
        bool, typer.Option("--saturation", help="Also find the rate at which the queue grows.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    as_json: AsJson = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what each figure is made of.")
    ] = False,
) -> None:
    """Simulate requests on the machine that a profile was measured on.

    Runs this engine, its scheduler and its prefix cache on a virtual clock. Exits with 0 if the
    objective is met (or none is given and the server keeps up), 1 if not, 2 for bad input.
    """
    from headrace.hardware.profile import load_profile
    from headrace.simulate.profiled import setup_of
    from headrace.simulate.serve import serve
    from headrace.workload.slo import parse_slo

    found = load_profile(profile)
    _check_model(model, found, profile)
    asked = Asked(
        workload=workload,
        trace=trace,
        input=input_lengths,
        output=output_lengths,
        arrivals=arrivals,
        rate=rate,
    )
    described = make_workload(asked, found.limits.context_tokens)
    if requests is not None and not 1 <= requests <= MOST_REQUESTS:
        raise ConfigError(f"--requests is {requests}; expected 1 to {MOST_REQUESTS}.")
    objective = parse_slo(slo) if slo else described.slo
    count = requests or (MOST_REQUESTS if trace else 300)
    report = serve(described.asks(seed, count), setup_of(found))
    bracket = None
    if saturation:
        from headrace.simulate.saturation import saturation as bracket_of

        seeds = (seed, seed + 1, seed + 2)
        bracket = bracket_of(described, setup_of(found), seeds=seeds)
    if as_json:
        facts = report_facts(report, objective)
        facts["saturation"] = None if bracket is None else asdict(bracket)
        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo("\n".join(lines(report, objective)))
        if bracket is not None:
            typer.echo(f"saturated    {bracket}")
        if explain:
            typer.echo("\n".join(explained(found, setup_of(found))))
    is_good = report.meets(objective) if objective is not None else not report.saturated
    raise typer.Exit(0 if is_good else 1)


def make_workload(asked: Asked, context_tokens: int) -> Workload:
    """From a name, a trace or lengths: one of them."""
    from headrace.workload.arrivals import parse_arrivals
    from headrace.workload.named import find_workload
    from headrace.workload.trace import read_trace
    from headrace.workload.workload import Synthetic, parse_lengths

    lengths = asked.input is not None or asked.output is not None
    if sum((asked.workload is not None, asked.trace is not None, lengths)) != 1:
        raise ConfigError(
            "Expected one of --workload, --trace, or --input and --output.", "Give one of them."
        )
    if asked.trace is not None:
        if asked.arrivals is not None:
            raise ConfigError("--arrivals and --trace are given; a trace has its own arrivals.")
        read = read_trace(asked.trace)
        return read if asked.rate is None else read.at_rate(asked.rate)
    if asked.workload is not None:
        named = find_workload(asked.workload)
        made = replace(named, context_tokens=min(named.context_tokens, context_tokens))
        if asked.arrivals is not None:
            made = replace(made, arrivals=parse_arrivals(asked.arrivals, asked.rate))
        return made if asked.rate is None else made.at_rate(asked.rate)
    if asked.input is None or asked.output is None:
        raise ConfigError("One of --input and --output is missing.", "Give both.")
    return Synthetic(
        prompts=parse_lengths(asked.input, "input"),
        outputs=parse_lengths(asked.output, "output"),
        arrivals=parse_arrivals(asked.arrivals or "poisson", asked.rate),
        context_tokens=context_tokens,
    )


def _check_model(model: str | None, found: Profile, path: Path) -> None:
    name = str(found.model.get("name", ""))
    if model is not None and Path(model).name.lower() not in name.lower():
        raise ConfigError(
            f"{path} is a profile of {name}, not of {model}.",
            f"Run headrace calibrate {model} --out FILE, and give that file as --profile.",
        )


def report_facts(report: Report, slo: Slo | None) -> dict[str, Any]:
    """docs/simulate.md has the schema. Seconds, tokens and requests; None: not known."""
    return {
        "requests": len(report.served),
        "refused": report.refused,
        "verdict": report.verdict.value,
        "output_tokens_s": report.output_tokens_s,
        "input_tokens_s": report.input_tokens_s,
        "requests_s": report.requests_s,
        "cached_share": report.cached_share,
        "steps": report.steps,
        "preemptions": report.preemptions,
        "latency": None
        if report.saturated
        else {name: _facts(times) for name, times in _latencies(report)},
        "slo": None
        if slo is None
        else {
            "objective": str(slo),
            "met_share": report.met_share(slo),
            "goodput_s": report.goodput_s(slo),
            "is_met": report.meets(slo),
        },
    }


def _latencies(report: Report) -> list[tuple[str, Percentiles | None]]:
    return [("ttft_s", report.ttft_s), ("tpot_s", report.tpot_s), ("e2e_s", report.e2e_s)]


def _facts(times: Percentiles | None) -> dict[str, float] | None:
    return None if times is None else asdict(times)


def lines(report: Report, slo: Slo | None) -> Iterator[str]:
    yield f"requests     {len(report.served)}, {report.refused} refused, {report.steps} steps"
    yield (
        f"throughput   {report.output_tokens_s:,.1f} tokens/s out, "
        f"{report.input_tokens_s:,.1f} in, {report.requests_s:.3g} requests/s"
    )
    yield f"from cache   {report.cached_share:.1%} of prompt tokens"
    if report.saturated:
        yield "verdict      saturated: the queue kept growing, so latencies have no meaning"
    else:
        yield f"verdict      {report.verdict.value}"
        yield f"{'':<13}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}"
        for name, times in _latencies(report):
            if times is not None:
                shown = "".join(f"{_ms(each):>10}" for each in _columns(times))
                yield f"{name.removesuffix('_s').upper():<13}{shown}"
    if slo is not None:
        met = "met" if report.meets(slo) else "not met"
        yield f"objective    {slo}: {met}"
        goodput = f"{report.goodput_s(slo):.3g} requests/s"
        yield f"within it    {report.met_share(slo):.1%}, goodput {goodput}"


def _columns(times: Percentiles) -> tuple[float, ...]:
    return (times.p50, times.p90, times.p99, times.mean)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def explained(found: Profile, setup: Setup) -> Iterator[str]:
    edge, machine = setup.edge, found.machine
    yield f"machine      {machine.get('cpu')}, measured {found.date}"
    yield f"step         {len(found.steps)} measured ones, interpolated; + what serving adds"
    yield "TTFT         first token - arrival = way in + queue + steps + way out"
    yield "TPOT         (last token - first token) / (tokens - 1)"
    yield (
        f"way in       {edge.busy_s * 1e3:.2f} ms + {edge.busy_token_s * 1e6:.2f} us a prompt token"
    )
    yield f"way out      {edge.after_s * 1e3:.2f} ms"
    yield (
        f"limits       {setup.limits.max_sequences} sequences, {setup.limits.max_batch_tokens} "
        f"tokens a step, {setup.limits.total_blocks} blocks of {setup.limits.block_tokens} tokens"
    )
    yield "goodput      requests/s x share of requests within the objective"
