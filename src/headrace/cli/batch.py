"""`headrace batch IN OUT`: answers a file of requests in OpenAI's batch format; can go on later.

Starts a server of its own for the time it takes, or uses one that runs. Reads flags and prints;
batch_file.py knows the format, batch_send.py sends.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import AsJson, ModelName
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cli.batch_file import Outline
    from headrace.cli.batch_send import Sums
    from headrace.doctor.endpoint import Endpoint

EXIT_LEFT = 1
_SHOW_S = 2.0


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one JSON line each.")],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Answers, one JSON line each; what is there is kept."),
    ],
    model: ModelName = None,
    url: Annotated[
        str | None, typer.Option(help="A server that runs; default: one is started for this.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1, max=512)] = 64,
    attempts: Annotated[
        int, typer.Option(help="How often a request is sent while the server is full.", min=1)
    ] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.", min=1)] = 600.0,
    key_variable: Annotated[
        str | None, typer.Option(help="The environment variable that holds the API key.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format. Run it again to go on where it stopped.

    Each answer is written as it comes, in the order of the answers; custom_id says which is which.
    A request that was answered is not sent again, errors included. Exit status 1: some got no
    answer.
    """
    from headrace.cli.batch_file import done_before, outline_of, requests_of
    from headrace.cli.batch_send import Sender, shown

    if source.resolve() == target.resolve():
        raise ConfigError("IN and OUT are the same file.", "Give another name for the answers.")
    outline = outline_of(source)
    done = done_before(target)
    todo = (each for each in requests_of(source) if each.custom_id not in done)
    whole = sum(1 for each in requests_of(source) if each.custom_id not in done)
    began_s = time.monotonic()
    with (
        _told_if_stopped(target, outline.requests),
        _server(url, model, key_variable, outline, is_needed=whole > 0) as endpoint,
    ):
        sender = Sender(
            endpoint=endpoint, concurrency=concurrency, attempts=attempts, timeout_s=timeout
        )
        said_s = began_s
        with _appended(target) as out:
            for sums in sender.run(todo, out):
                if time.monotonic() - said_s >= _SHOW_S:
                    said_s = time.monotonic()
                    typer.echo(shown(sums, whole, began_s), err=True)
    _report(sender.sums, outline, len(done), whole, time.monotonic() - began_s, as_json=as_json)
    if sender.sums.left:
        raise typer.Exit(EXIT_LEFT)


@contextlib.contextmanager
def _told_if_stopped(target: Path, whole: int) -> Iterator[None]:
    """A Ctrl-C says what is kept and how to go on."""
    from headrace.cli.batch_file import done_before

    try:
        yield
    except KeyboardInterrupt:
        kept = len(done_before(target))
        line = f"stopped: {target} has {kept:,} of {whole:,} answers; run the same again to go on"
        typer.echo(line, err=True)
        raise


@contextlib.contextmanager
def _appended(target: Path) -> Iterator[IO[bytes]]:
    try:
        out = target.open("ab")
    except OSError as error:
        raise ConfigError(
            f"{target} can't be written: {error.strerror or error}.", "Give another file for OUT."
        ) from None
    with out:
        yield out


@contextlib.contextmanager
def _server(
    url: str | None,
    model: str | None,
    key_variable: str | None,
    outline: Outline,
    *,
    is_needed: bool,
) -> Iterator[Endpoint]:
    from headrace.doctor.endpoint import Endpoint, key_from

    if url is not None:
        if model is not None:
            raise ConfigError("--url and --model are given.", "Keep one: a URL has its model.")
        text = f"127.0.0.1{url}" if url.startswith(":") else url
        yield Endpoint(text, key=key_from(key_variable))
        return
    if not is_needed:
        yield Endpoint("127.0.0.1:1")  # is not asked
        return
    from headrace.calibrate.client import Server

    # The file's own names for the model: it was perhaps written for another service.
    flags = ["--mode", "batch"]
    if outline.models:
        flags += ["--served-model-name", ",".join(outline.models)]
    typer.echo("starting a server for this batch", err=True)
    with Server(model, flags) as server:
        yield Endpoint(f"127.0.0.1:{server.port}")


def _report(
    sums: Sums, outline: Outline, before: int, whole: int, seconds: float, *, as_json: bool
) -> None:
    facts = {
        "schema": "headrace-batch/1",
        "requests": outline.requests,
        "answered_before": before,
        "answered": sums.answered,
        "with_error": sums.refused,
        "without_answer": sums.left,
        "prompt_tokens": sums.prompt_tokens,
        "output_tokens": sums.output_tokens,
        "seconds": round(seconds, 3),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    if before:
        typer.echo(f"{before:,} of {outline.requests:,} were answered before")
    rate = sums.output_tokens / max(seconds, 1e-9)
    typer.echo(
        f"{sums.answered:,} of {whole:,} answered in {seconds:,.1f} s: {sums.prompt_tokens:,} "
        f"prompt and {sums.output_tokens:,} output tokens, {rate:,.0f} output tokens/s"
    )
    if sums.refused:
        typer.echo(f"{sums.refused:,} of the answers are errors: see their status_code")
    if sums.left:
        line = f"{sums.left:,} got no answer ({sums.last_failure}): run the same again"
        typer.echo(line, err=True)
