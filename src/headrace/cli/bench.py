"""`headrace bench`: load tests of any OpenAI-compatible endpoint, and what changed between two.

Reads flags and prints; bench/ does the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.cli.options import AsJson
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.climb import Climbed
    from headrace.bench.run import Progress
    from headrace.bench.session import Session
    from headrace.bench.summary import Summary
    from headrace.bench.sweep import Point
    from headrace.workload.workload import Workload

EXIT_NOT_MET = 1
_POINT_S = 20.0


class _ByUrl(TyperGroup):
    """`bench URL` is `bench run URL`: a first word that is no command is a URL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """With the flags of `run`: who asks about `bench` wants to know these."""
        run = self.commands["run"]
        return f"{super().get_help(ctx)}\n\n{run.get_help(run.context_class(run, ctx, 'run'))}"


bench_app = typer.Typer(
    cls=_ByUrl,
    help="How fast an endpoint is under load, and how sure that is: `headrace bench URL`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.command()
def run(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server, such as :8000.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Its model; default: the first it lists.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="chat, rag, code, batch or agent: docs/workload.md.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded requests: CSV or Mooncake.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Lines of text, or JSON with prompt or messages.")
    ] = None,
    input_lengths: Annotated[
        str | None, typer.Option("--input", help="Prompt tokens: 512 (default), normal:512,64, ...")
    ] = None,
    output_lengths: Annotated[
        str | None, typer.Option("--output", help="Tokens of answers; default: 128.")
    ] = None,
    prefixes: Annotated[int, typer.Option(help="How many shared prefixes.", min=0)] = 0,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each.", min=0)] = 0,
    turns: Annotated[str | None, typer.Option(help="Of a session: 4, uniform:1,7, ...")] = None,
    follow_ups: Annotated[
        str | None, typer.Option(help="New tokens of later turns; default: as --input.")
    ] = None,
    wait: Annotated[
        str | None, typer.Option(help="Seconds from an answer to the next turn: exponential:2, ...")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="A closed loop of so many clients; default: 8.", min=1)
    ] = None,
    rate: Annotated[float | None, typer.Option(help="An open loop: requests a second.")] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="With --rate: poisson (default), constant or gamma:CV.")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Of an open loop; those who wait for it are late.", min=1)
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Raise the rate until the endpoint saturates.")
    ] = False,
    hold: Annotated[
        float | None,
        typer.Option(help="Find the highest rate within --slo; stay there for seconds.", min=1),
    ] = None,
    point: Annotated[
        float | None,
        typer.Option(help="Seconds of each rate of --sweep and --hold; default: 20.", min=4),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Stop after so many; default: 100.", min=1)
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Stop sending after so many seconds.", min=0.1)
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(help="Stop when medians are known so well: 0.05 is 5%.", min=0.001, max=1),
    ] = None,
    warm_up: Annotated[
        int | None,
        typer.Option(help="Requests before the clock starts; default: 2 a client.", min=0),
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Such as ttft=500ms,tpot=50ms,share=99%.")] = None,
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    extra: Annotated[
        str | None, typer.Option(help='Fields for each request, as JSON: {"top_p": 0.9}.')
    ] = None,
    key_variable: Annotated[
        str | None, typer.Option(help="The environment variable that holds the API key.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(help="Of the API: a name of `cost --apis`, or NAME=IN/OUT.")
    ] = None,
    spend_limit: Annotated[
        float | None, typer.Option(help="US dollars that requests may cost; needs --price.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.", min=1)] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    salt: Annotated[
        str | None, typer.Option(help="Of the prompts' words; default: new in each run.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model (as of `run`) whose tokenizer checks the counts.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The server's GPU: MFU and bandwidth use are shown.")
    ] = None,
    gpu_model: Annotated[
        str | None, typer.Option(help="With --gpu: the model, if its name is not known.")
    ] = None,
    gpu_precision: Annotated[
        str | None, typer.Option(help="With --gpu: of the weights, such as fp8.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="With --gpu: how many share the model.", min=1)] = 1,
    save: Annotated[
        Path | None, typer.Option(help="Write JSON there, with `vllm bench serve`'s keys.")
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With every request's times and text.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts there.")] = None,
    aiperf: Annotated[
        Path | None, typer.Option(help="Write AIPerf's JSONL and CSV into this folder.")
    ] = None,
    mooncake: Annotated[
        Path | None, typer.Option(help="Write what was sent as a Mooncake trace there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send requests on a schedule, and say what a user would have seen.

    Exits with 1 if the objective is not met, no request succeeded, or the client was not fit.
    """
    from headrace.bench.session import Session
    from headrace.cli import bench_asked, bench_output
    from headrace.cli.bench_clash import refuse_clashes

    refuse_clashes({
        "workload": workload, "trace": trace, "prompts": prompts, "input": input_lengths,
        "prefixes": prefixes, "turns": turns, "follow_ups": follow_ups, "wait": wait,
        "concurrency": concurrency, "rate": rate, "max_concurrency": max_concurrency,
        "sweep": sweep, "hold": hold, "point": point, "requests": requests, "duration": duration,
        "precision": precision, "warm_up": warm_up, "slo": slo, "gpu": gpu,
        "gpu_model": gpu_model, "gpu_precision": gpu_precision, "gpus": gpus > 1,
    })  # fmt: skip
    climbs = sweep or hold is not None
    if climbs and arrivals is not None:
        rate = 1.0  # of the shape of the arrivals; which rates are tried is found out
    flags = bench_asked.Flags(
        workload=workload, trace=trace, prompts=prompts, input=input_lengths,
        output=output_lengths, prefixes=prefixes, prefix_tokens=prefix_tokens, turns=turns,
        follow_ups=follow_ups, wait=wait, concurrency=concurrency, rate=rate, arrivals=arrivals,
    )  # fmt: skip
    described = bench_asked.workload_of(flags)
    asked = bench_asked.asked_of(
        described, flags, url=url, model=model, api=api, extra=extra, key_variable=key_variable,
        requests=requests, duration=duration, precision=precision, warm_up=warm_up, slo=slo,
        max_concurrency=max_concurrency, timeout=timeout, seed=seed, salt=salt, price=price,
        spend_limit=spend_limit,
    )  # fmt: skip
    outputs = bench_output.Outputs(
        save=save, save_detailed=save_detailed, html=html, aiperf=aiperf, mooncake=mooncake,
        as_json=as_json, gpu=gpu, gpu_model=gpu_model, gpu_precision=gpu_precision, gpus=gpus,
    )  # fmt: skip
    bench_output.check(outputs)
    count = bench_asked.counter_of(tokenizer)
    session = Session(asked, _progress(), count=count)
    climbed: Climbed | None = None
    if climbs:
        climbed = _climbed(session, described, point or _POINT_S, hold)
        summary = climbed.best.summary
    else:
        summary = _measured(session, described)
    _clear_line()
    bench_output.write(session, described, summary, climbed, outputs)
    is_good = bool(summary.good) and summary.health.is_valid and not summary.has_given_up
    if climbed is not None and hold is not None:
        is_good = is_good and climbed.held is not None and climbed.held.is_kept
    elif climbed is not None:
        is_good = is_good and not climbed.ended_by
    else:
        is_good = is_good and summary.is_met is not False
    raise typer.Exit(0 if is_good else EXIT_NOT_MET)


def _measured(session: Session, workload: Workload) -> Summary:
    from headrace.bench.session import run_session

    async def work() -> Summary:
        await session.open()
        return await session.measure(workload)

    return run_session(session, work)


def _climbed(session: Session, workload: Workload, point_s: float, hold_s: float | None) -> Climbed:
    from headrace.bench.climb import climb
    from headrace.bench.session import run_session
    from headrace.cli.bench_output import point_line

    def show(point: Point) -> None:
        _clear_line()
        typer.echo(point_line(point), err=True)

    async def work() -> Climbed:
        await session.open()
        return await climb(session, workload, point_s=point_s, hold_s=hold_s, on_point=show)

    return run_session(session, work)


@bench_app.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="FILE, or FILE,FILE,FILE.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same, of the other side.")],
    as_json: AsJson = False,
) -> None:
    """Better, worse or inconclusive? Of files written with --save FILE --save-detailed.

    Exits with 1 if something is worse. Three files a side tell most.
    """
    import json
    from dataclasses import asdict

    from headrace.bench import compare as comparing

    sides = [
        [comparing.read_run(Path(name)) for name in side.split(",") if name]
        for side in (before, after)
    ]
    if not all(sides):
        raise ConfigError("One side has no file.", "Give FILE, or FILE,FILE,FILE.")
    found = comparing.compare(*sides)
    if as_json:
        rows = [asdict(row) | {"verdict": row.verdict} for row in found.rows]
        typer.echo(json.dumps({"rows": rows, "notes": list(found.notes)}, indent=2))
    else:
        typer.echo("\n".join(comparing.rendered(found)))
    raise typer.Exit(1 if found.is_worse else 0)


def _progress() -> Callable[[Progress], None]:
    """On a terminal: one line that changes. Elsewhere nothing."""
    if not sys.stderr.isatty():
        return lambda progress: None

    def show(progress: Progress) -> None:
        rate = progress.tokens / progress.elapsed_s if progress.elapsed_s else 0.0
        line = (
            f"{progress.elapsed_s:6.1f} s  {progress.done} done, {progress.failed} failed, "
            f"{progress.at_once} at once, {rate:,.0f} tokens/s"
        )
        print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)

    return show


def _clear_line() -> None:
    if sys.stderr.isatty():
        print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)
