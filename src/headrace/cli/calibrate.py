"""`headrace calibrate`: measures this machine and a model, and writes a profile.

Shows what is being done and what was found; calibrate/ measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, ModelArgument, ModelName, Offline, one_model
from headrace.core.config import Device, EngineConfig, KvDtype, LoadFormat, Quantization
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.hardware.profile import Profile

DEFAULT_OUT = Path("headrace-profile.json")
Tell = Callable[[str, int, int | None], None]


def calibrate(
    name: ModelArgument = None,
    model: ModelName = None,
    out: Annotated[
        Path, typer.Option("--out", help="The profile; one that is there is replaced.")
    ] = DEFAULT_OUT,
    seconds: Annotated[
        float, typer.Option(help="How long to measure; at least three rounds are made.")
    ] = 120.0,
    device: Annotated[Device, typer.Option(help="What computes, as for serve.")] = Device.AUTO,
    threads: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    quantization: Annotated[Quantization | None, typer.Option(help="As for serve.")] = None,
    kv_dtype: Annotated[KvDtype | None, typer.Option(help="As for serve.")] = None,
    load_format: Annotated[LoadFormat | None, typer.Option(help="As for serve.")] = None,
    serve: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Also measure the way through a server.")
    ] = True,
    offline: Offline = False,
    as_json: AsJson = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every measured step and how it is used.")
    ] = False,
) -> None:
    """Measure this machine and a model: bandwidth, rates, step times, and what serving adds.

    Writes a profile that fit, plan and simulate read. Nothing else should run meanwhile. A
    Ctrl-C keeps what was measured by then, and exits with 1.
    """
    from headrace.calibrate.run import calibrate as measure

    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"--seconds is {seconds:g}; expected 1 to 86400.", "Give another.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out is {out}; its folder does not exist.", "Create it first.")
    given = {
        "threads": threads,
        "max_sequences": max_sequences,
        "max_batch_tokens": max_batch_tokens,
        "quantization": quantization,
        "kv_dtype": kv_dtype,
        "load_format": load_format,
    }
    given = {key: value for key, value in given.items() if value is not None}
    config = EngineConfig.from_mapping({"device": device, **given})
    flags = ["--device", device.value]
    for key, value in given.items():
        flags += [f"--{key.replace('_', '-')}", str(value)]
    with _shown() as tell:
        profile = measure(
            one_model(name, model),
            config=config,
            seconds=seconds,
            tell=tell,
            offline=offline,
            with_server=serve,
            flags=[*flags, *(["--offline"] if offline else [])],
        )
    profile.save(out)
    if as_json:
        typer.echo(out.read_text("utf-8"), nl=False)
    else:
        typer.echo("\n".join(summary(profile, explain=explain)))
        typer.echo(f"written to {out}")
    if not profile.is_complete:
        typer.echo("It was stopped early: the profile has what was measured by then.", err=True)
        raise typer.Exit(1)


def summary(profile: Profile, *, explain: bool = False) -> Iterator[str]:
    """For a person, within 100 columns."""
    machine, model = profile.machine, profile.model
    gpu = machine.get("gpu")
    what = gpu.get("name") if gpu else f"{machine.get('cpu')}, {machine.get('threads')} threads"
    yield f"{model.get('name')} on {what}"
    if profile.ceilings is not None:
        ceilings = profile.ceilings
        rates = (
            f"{rate / 1e9:,.1f} GB/s" + ("" if threads == "gpu" else f" with {threads}")
            for threads, rate in ceilings.read_bytes_s.items()
        )
        yield f"  reading        {', '.join(rates)}"
        products = (f"{rate / 1e9:,.0f} G/s {name}" for name, rate in ceilings.multiplies_s.items())
        yield f"  multiply-adds  {', '.join(products)}"
    yield f"  {'step':<34}{'median':>10}{'spread':>8}{'tokens/s':>10}"
    for step in profile.steps:
        plain = (
            not step.prompt_start and step.draws and not (step.decode_rows and step.prompt_tokens)
        )
        if explain or (plain and step.context_tokens <= _usual_context(profile)):
            yield f"  {_named(step):<34}{_ms(step.seconds):>10}{step.spread:>8.1%}" + (
                f"{(step.decode_rows + step.prompt_tokens) / step.seconds:>10,.0f}"
            )
    if profile.serving is not None:
        yield from _serving_lines(profile)
    if explain:
        yield "Between measured steps: linear interpolation over decoding rows and prompt tokens."
        yield "Longer contexts add the measured slope of attention; see docs/calibrate.md."


def _usual_context(profile: Profile) -> int:
    return min(step.context_tokens for step in profile.steps if step.decode_rows)


def _named(step: Any) -> str:
    parts = []
    if step.decode_rows:
        parts.append(f"{step.decode_rows} decode after {step.context_tokens}")
    if step.prompt_tokens:
        after = f" after {step.prompt_start}" if step.prompt_start else ""
        parts.append(f"prompt of {step.prompt_tokens}{after}{'' if step.draws else ', no draw'}")
    return ", ".join(parts)


def _serving_lines(profile: Profile) -> Iterator[str]:
    assert profile.serving is not None
    for one in profile.serving.streams:
        yield (
            f"  served, {one.streams} streams: {_ms(one.token_s)} a token, "
            f"{_ms(one.alone_s)} a step alone"
        )
    for first in profile.serving.first_tokens:
        yield (
            f"  served, {first.prompt_tokens} cached tokens: {_ms(first.ttft_s)} to the first "
            f"token, {_ms(first.alone_s)} its step alone"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


@contextmanager
def _shown() -> Iterator[Tell]:
    """A bar on a terminal, else one line a stage, on standard error."""
    if not sys.stderr.isatty():
        said: list[str] = []

        def say(what: str, done: int, total: int | None) -> None:
            if what not in said:
                said.append(what)
                print(what, file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        stages: dict[str, Any] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in stages:
                stages[what] = bars.add_task(what, total=total)
            bars.update(stages[what], completed=done, total=total)

        yield update
