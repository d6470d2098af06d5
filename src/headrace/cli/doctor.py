"""`headrace doctor`: why an endpoint is slow, and what to change; `verify` and `preflight` too.

Reads flags and prints; doctor/ does the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.cli.options import AsJson
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.doctor.collect import Wanted
    from headrace.doctor.endpoint import Endpoint
    from headrace.doctor.observation import Observation
    from headrace.doctor.report import Diagnosis

EXIT_FOUND = 1


class _ByUrl(TyperGroup):
    """`doctor URL` is `doctor examine URL`: a first word that is no command is a URL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["examine", *args]
        return super().parse_args(ctx, args)


doctor_app = typer.Typer(
    cls=_ByUrl,
    help="Why an endpoint is slow and what to change: `headrace doctor URL`. Reads its metrics "
    "twice, asks it what it tells, and probes it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Argument(metavar="URL", help="Of the server, such as :8000.")]
NoProbe = Annotated[bool, typer.Option("--no-probe", help="Only read; send no request.")]
Yes = Annotated[
    bool, typer.Option("--yes", help="Probe a host that is not this machine without asking.")
]
Interval = Annotated[float, typer.Option(help="Seconds between the two readings.", min=0.2)]
KeyVariable = Annotated[
    str | None, typer.Option(help="The environment variable that holds the API key.")
]
SloText = Annotated[
    str | None, typer.Option("--slo", help="What is fast enough; default: ttft=500ms,tpot=50ms.")
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", help="The server's GPU, as `headrace gpus` names it.")
]
ModelOfIt = Annotated[
    str | None, typer.Option("--model", "-m", help="Its model; default: the first it lists.")
]
Concurrency = Annotated[int, typer.Option(help="Requests of a burst at once.", min=2, max=64)]
Save = Annotated[Path | None, typer.Option(help="Also write the report as JSON there.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Of `headrace calibrate`: step times, for predicted gains."),
]
SchemaFile = Annotated[
    Path | None, typer.Option("--schema", help="Your JSON schema, for answers with a grammar.")
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Show all that was read, and what is unknown and why.")
]


@doctor_app.command()
def examine(
    url: Url,
    no_probe: NoProbe = False,
    yes: Yes = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Read again and again; print what changes. No probes.")
    ] = False,
    from_prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Read metrics from this Prometheus server instead."),
    ] = None,
    selector: Annotated[
        str, typer.Option(help='Of its series, only those with these labels: job="vllm".')
    ] = "",
    direct: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server behind the proxy: probe it as well."),
    ] = None,
    before: Annotated[
        Path | None, typer.Option(help="An earlier report of the same server, to compare with.")
    ] = None,
    about: Annotated[
        str | None,
        typer.Option(help="What you want to tune (queue, prefill, decode, sample, ...)."),
    ] = None,
    interval: Interval = 5.0,
    concurrency: Concurrency = 8,
    slo: SloText = None,
    gpu: GpuName = None,
    profile: ProfileFile = None,
    schema: SchemaFile = None,
    model: ModelOfIt = None,
    key_variable: KeyVariable = None,
    save: Save = None,
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """Why is this endpoint slow? Exit status 1: a fault was found, or nothing could be measured."""
    from headrace.doctor.report import earlier_of, examine, load, no_verdict

    endpoint = _endpoint(url, key_variable)
    wanted = _wanted(
        interval=interval, concurrency=concurrency, slo=slo, gpu=gpu, model=model,
        probes=not no_probe and not watch, about=about, profile=profile, schema=schema,
        direct=_endpoint(direct, key_variable) if direct else None,
        earlier=earlier_of(load(before)) if before is not None else None,
    )  # fmt: skip
    _may_save(save)
    if watch:
        _watch(
            lambda: _observe(endpoint, wanted, from_prometheus, selector),
            wanted.interval_s,
            save=save,
            as_json=as_json,
        )
        return
    _may_probe(endpoint, wanted, yes=yes)
    found = examine(_observe(endpoint, wanted, from_prometheus, selector))
    _show(found, save=save, explain=explain, as_json=as_json)
    is_bad = any(finding.kind in ("fault", "counter") for finding in found.findings)
    if is_bad or no_verdict(found.seen) is not None:
        raise typer.Exit(EXIT_FOUND)


@doctor_app.command()
def verify(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="Of before, made by --save.")],
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Where it is now; default: as before.")
    ] = None,
    yes: Yes = False,
    interval: Interval = 2.0,
    concurrency: Concurrency = 8,
    schema: SchemaFile = None,
    model: ModelOfIt = None,
    key_variable: KeyVariable = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """After the fix: probe again, and say whether it helped. Exit status 1: it did not."""
    from headrace.cli.doctor_text import notes, show_verified
    from headrace.core.ratio import Verdict
    from headrace.doctor.report import examine, facts, load, no_verdict
    from headrace.doctor.verify import compare, helped, promises

    before = load(report)
    endpoint = _endpoint(url or str(before["url"]), key_variable)
    wanted = _wanted(interval=interval, concurrency=concurrency, model=model, schema=schema)
    _may_save(save)
    _may_probe(endpoint, wanted, yes=yes)
    found = examine(_observe(endpoint, wanted, None, ""))
    after = facts(found)
    _keep(save, after)
    _needs_answers(found.seen)
    rows = compare(before, after)
    # What did not show before the endpoint went away may still be there.
    is_whole = no_verdict(found.seen) is None
    kept = promises(before, after, rows) if is_whole else ()
    verdict = helped(rows) if is_whole else Verdict.INCONCLUSIVE
    if as_json:
        from dataclasses import asdict

        compared = [asdict(row) | {"verdict": row.verdict} for row in rows]
        shown = {
            "schema": "headrace-doctor-verify/1",
            "verdict": verdict,
            "compared": compared,
            "predicted": [asdict(each) for each in kept],
            "notes": notes(before, after),
        }
        typer.echo(json.dumps(shown, indent=2))
    else:
        show_verified(rows, kept, verdict, notes(before, after))
    if verdict is not Verdict.BETTER:
        raise typer.Exit(EXIT_FOUND)


@doctor_app.command()
def preflight(
    url: Url,
    yes: Yes = False,
    interval: Interval = 2.0,
    concurrency: Concurrency = 8,
    slo: SloText = None,
    gpu: GpuName = None,
    model: ModelOfIt = None,
    key_variable: KeyVariable = None,
    as_json: AsJson = False,
) -> None:
    """Ten questions before it goes live: pass, fail or unknown. Exit status 1: one failed."""
    from headrace.cli.doctor_text import folded
    from headrace.doctor.preflight import Answered
    from headrace.doctor.preflight import preflight as checked

    endpoint = _endpoint(url, key_variable)
    wanted = _wanted(interval=interval, concurrency=concurrency, slo=slo, gpu=gpu, model=model)
    _may_probe(endpoint, wanted, yes=yes)
    seen = _observe(endpoint, wanted, None, "")
    _needs_answers(seen)
    checks = checked(seen)
    if as_json:
        from dataclasses import asdict

        rows = [asdict(check) for check in checks]
        typer.echo(json.dumps({"schema": "headrace-preflight/1", "checks": rows}, indent=2))
    else:
        for check in checks:
            typer.echo(f"{check.number:>2}  {check.answer.upper():<8} {check.question}")
            for line in folded(check.evidence):
                typer.echo(f"             {line}")
            for line in folded(f"try: {check.remedy}") if check.remedy else ():
                typer.echo(f"             {line}")
    if any(check.answer is Answered.FAIL for check in checks):
        raise typer.Exit(EXIT_FOUND)


def _endpoint(url: str, key_variable: str | None) -> Endpoint:
    from headrace.doctor.endpoint import Endpoint, key_from

    text = f"127.0.0.1{url}" if url.startswith(":") else url
    return Endpoint(text, key=key_from(key_variable))


def _wanted(
    *,
    interval: float,
    concurrency: int,
    slo: str | None = None,
    gpu: str | None = None,
    model: str | None = None,
    probes: bool = True,
    about: str | None = None,
    direct: Any = None,
    earlier: Any = None,
    profile: Path | None = None,
    schema: Path | None = None,
) -> Wanted:
    from headrace.doctor.collect import Wanted
    from headrace.doctor.observation import CHAT
    from headrace.doctor.probe_plan import Plan
    from headrace.hardware.gpus import find_gpu
    from headrace.hardware.profile import load_profile
    from headrace.workload.slo import parse_slo

    if gpu is not None:
        find_gpu(gpu)  # refused before anything is sent
    return Wanted(
        interval_s=interval,
        plan=Plan(concurrency=concurrency, schema=_schema(schema)),
        profile=load_profile(profile) if profile is not None else None,
        objective=CHAT if slo is None else parse_slo(slo),
        gpu=gpu,
        model=model,
        probes=probes,
        about=about,
        direct=direct,
        earlier=earlier,
    )


def _schema(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON schema: {error}.", "Give a file of JSON.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON schema: not an object.", "Give a file of JSON.")
    return found


def _needs_answers(seen: Observation) -> None:
    """Where every probe failed, nothing else would be true."""
    from headrace.doctor.report import all_failed, no_verdict

    if all_failed(seen):
        typer.echo(no_verdict(seen), err=True)
        raise typer.Exit(EXIT_FOUND)


def _may_save(path: Path | None) -> None:
    """Before a minute of probes is spent."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"A report can't be written to {path}.", "Give a file in a folder that can be written."
        )


def _keep(path: Path | None, report: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"The report can't be written: {error}.", "Try another file.") from None


def _may_probe(endpoint: Endpoint, wanted: Wanted, *, yes: bool) -> None:
    """This machine is anyone's to probe; another host has to be meant."""
    for each in (endpoint, wanted.direct):
        if each is None or not wanted.probes or yes or each.is_loopback:
            continue
        raise ConfigError(
            f"{each.host} is another machine, and probes are requests that it has to answer.",
            "Add --yes if you may load it, or --no-probe.",
        )


def _observe(
    endpoint: Endpoint, wanted: Wanted, from_prometheus: str | None, selector: str
) -> Observation:
    from headrace.doctor.collect import observe, observe_prometheus

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if from_prometheus is not None:
        server = _endpoint(from_prometheus, None)
        return observe_prometheus(endpoint, server, wanted, selector=selector, say=say)
    return observe(endpoint, wanted, say=say)


def _show(found: Diagnosis, *, save: Path | None, explain: bool, as_json: bool) -> None:
    from headrace.doctor.report import facts, lines

    if as_json:
        typer.echo(json.dumps(facts(found), indent=2))
    else:
        for line in lines(found, explain=explain):
            typer.echo(line)
    _keep(save, facts(found))


def _watch(
    look: Callable[[], Observation], interval_s: float, *, save: Path | None, as_json: bool
) -> None:
    """Until it is interrupted. A finding is shown when it comes and when it goes; as JSON, every
    look is a line. `save` has the last one."""
    from headrace.cli.doctor_text import show_changes
    from headrace.doctor.endpoint import EndpointError
    from headrace.doctor.report import examine, facts

    there: dict[int, str] = {}
    while True:
        now = time.strftime("%H:%M:%S")
        try:
            found = examine(look())
        except EndpointError as error:
            typer.echo(f"{now}  {error.cause}", err=as_json)
            time.sleep(interval_s)
            continue
        _keep(save, facts(found))
        if as_json:
            typer.echo(json.dumps(facts(found)))
        else:
            show_changes(now, found, there)
        sys.stdout.flush()
