"""`headrace bench`: load tests of any OpenAI-compatible endpoint.

Reads flags and prints; bench/ does the rest.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.cli.options import AsJson
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.run import Progress
    from headrace.bench.session import Session
    from headrace.bench.summary import Summary
    from headrace.workload.workload import Workload

EXIT_NOT_MET = 1


class _ByUrl(TyperGroup):
    """`bench URL` is `bench run URL`: a first word that is no command is a URL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


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
        int | None, typer.Option(help="Requests before the clock starts; default: 2 a client.")
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Such as ttft=500ms,tpot=50ms,share=99%.")] = None,
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    extra: Annotated[
        str | None, typer.Option(help='Fields for each request, as JSON: {"top_p": 0.9}.')
    ] = None,
    key_variable: Annotated[
        str | None, typer.Option(help="The environment variable that holds the API key.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.", min=1)] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    salt: Annotated[
        str | None, typer.Option(help="Of the prompts' words; default: new in each run.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write JSON there, with `vllm bench serve`'s keys.")
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With every request's times and text.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send requests on a schedule, and say what a user would have seen.

    Exits with 1 if the objective is not met, no request succeeded, or the client was not fit.
    """
    from headrace.bench.session import Session, run_session
    from headrace.bench.table import lines
    from headrace.bench.vllm_result import result
    from headrace.cli import bench_asked

    flags = bench_asked.Flags(
        workload=workload, trace=trace, prompts=prompts, input=input_lengths,
        output=output_lengths, prefixes=prefixes, prefix_tokens=prefix_tokens, turns=turns,
        follow_ups=follow_ups, wait=wait, concurrency=concurrency, rate=rate, arrivals=arrivals,
    )  # fmt: skip
    described = bench_asked.workload_of(flags)
    asked = bench_asked.asked_of(
        described, flags, url=url, model=model, api=api, extra=extra, key_variable=key_variable,
        requests=requests, duration=duration, precision=precision, warm_up=warm_up, slo=slo,
        max_concurrency=max_concurrency, timeout=timeout, seed=seed, salt=salt,
    )  # fmt: skip
    session = Session(asked, _progress())

    async def work() -> Summary:
        await session.open()
        return await session.measure(described)

    summary = run_session(session, work)
    _clear_line()
    about = about_run(session, described)
    found = result(summary, about, date=datetime.now(UTC), detailed=save_detailed)
    if save is not None:
        _write(save, found)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo("\n".join([f"endpoint     {about['headrace_endpoint']}", *lines(summary)]))
    is_good = bool(summary.good) and summary.health.is_valid and summary.is_met is not False
    raise typer.Exit(0 if is_good else EXIT_NOT_MET)


def about_run(session: Session, workload: Workload) -> dict[str, Any]:
    """As vLLM names it: request_rate is "inf" in a closed loop."""
    from headrace.bench.feed import clients_of
    from headrace.workload.arrivals import OpenLoop
    from headrace.workload.workload import Synthetic

    asked, target = session.asked, session.target
    assert target is not None
    kind = "openai-chat" if asked.path.endswith("chat/completions") else "openai"
    clients = clients_of(workload)
    arrivals = workload.arrivals if isinstance(workload, Synthetic) else None
    loop = arrivals if isinstance(arrivals, OpenLoop) else None
    return {
        "backend": kind,
        "endpoint_type": kind,
        "model_id": target.model,
        "request_rate": "inf" if loop is None else loop.rate_s,
        "burstiness": 1 / loop.cv**2 if loop is not None and loop.cv > 1e-3 else 1.0,
        "max_concurrency": clients or asked.most_at_once,
        "headrace_endpoint": f"{asked.address.url}{asked.path}, {target.model}",
    }


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(found) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}.", "Give another --save."
        ) from None


def _progress() -> Any:
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
