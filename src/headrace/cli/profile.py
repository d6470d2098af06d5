"""`headrace profile`: where a step's time goes: a model's, by operation, or a running server's.

Reads flags; calibrate/ measures, a server's own history tells the rest, profile_text.py prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, Offline
from headrace.core.config import Device, EngineConfig, GraphMode, KvDtype, LoadFormat, Quantization
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.assemble import Assembled
    from headrace.calibrate.step_profile import Peaks, StepProfile
    from headrace.calibrate.steps import Point

SCHEMA = "headrace-profile-step/1"
_URL = re.compile(r"https?://|:\d+$|[\w.-]+:\d+(/|$)|localhost")
_CPU_ROWS, _CPU_PROMPTS = (1, 16), (512,)
_GPU_ROWS, _GPU_PROMPTS = (1, 64, 256), (2048,)
_MOST = 65_536


class Graphs(StrEnum):
    BOTH = "both"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    points: list[Point]
    rounds: int
    profile: Path | None
    modes: tuple[str, ...]
    nvtx: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    peaks: Peaks | None
    steps: list[StepProfile]
    sheet: str | None = None  # of the GPU


def profile(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[URL|MODEL]", help="A server that runs, or a model to load."),
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option(help="Sequences that decode in a step. May be given several times."),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a prompt, as a step. May be given several times."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens before decoded ones.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Of each step; the best counts.", min=1)] = 10,
    device: Annotated[Device, typer.Option(help="What computes, as for serve.")] = Device.AUTO,
    threads: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    quantization: Annotated[
        Quantization, typer.Option(help="As for serve, on a GPU.")
    ] = Quantization.NONE,
    kv_dtype: Annotated[KvDtype | None, typer.Option(help="As for serve.")] = None,
    load_format: Annotated[LoadFormat, typer.Option(help="As for serve.")] = LoadFormat.AUTO,
    graphs: Annotated[
        Graphs, typer.Option(help="On a GPU: steps from CUDA graphs, kernel by kernel, or both.")
    ] = Graphs.BOTH,
    nvtx: Annotated[
        bool,
        typer.Option("--nvtx", help="On a GPU: only run the steps, in NVTX ranges, for nsys."),
    ] = False,
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
    from headrace.backends.registry import choose_backend

    name = choose_backend(EngineConfig(device=device)).name
    if name is Device.REFERENCE:
        raise ConfigError(
            "headrace profile times the operations of a CPU or a GPU, not of the reference "
            "backend.",
            "Use --device cpu or cuda.",
        )
    if nvtx and name is not Device.CUDA:
        raise ConfigError("--nvtx is for a GPU; this would run on a CPU.", "Leave it out.")
    points = _points(rows or [], prompt or [], context, is_gpu=name is Device.CUDA)
    config = _config(
        points,
        device=name,
        threads=threads,
        quantization=quantization,
        kv_dtype=kv_dtype,
        load_format=load_format,
        graphs=GraphMode.OFF if graphs is Graphs.OFF else GraphMode.LAZY,
    )
    modes = {Graphs.BOTH: ("graphs", "launches"), Graphs.ON: ("graphs",)}
    asked = _Asked(
        points=points,
        rounds=rounds,
        profile=profile,
        modes=modes.get(graphs, ("launches",)),
        nvtx=nvtx,
    )
    with _loaded(target, config, offline=offline) as loaded:
        measure = _on_gpu if name is Device.CUDA else _on_cpu
        found = measure(loaded, asked)
        model, weight_bytes = loaded.model_path.name, loaded.ledger.weights_bytes
    if nvtx:
        typer.echo("the steps ran inside NVTX ranges; nsys shows them")
        return
    if trace is not None:
        from headrace.calibrate.step_profile import trace_of

        trace.write_text(json.dumps(trace_of(found.steps)) + "\n")
    if as_json:
        typer.echo(json.dumps(_facts(model, found), indent=2))
        return
    from headrace.cli.profile_text import explained, show_profile

    show_profile(model, weight_bytes, found.peaks, found.sheet, found.steps)
    if explain:
        typer.echo("\n".join(explained(is_gpu=name is Device.CUDA)))
    if trace is not None:
        typer.echo(f"\ntrace written to {trace}")


def _points(rows: list[int], prompts: list[int], context: int, *, is_gpu: bool) -> list[Point]:
    from headrace.calibrate.steps import Point

    for flag, given in (("--rows", rows), ("--prompt", prompts)):
        if given and not (min(given) >= 1 and max(given) <= _MOST):
            raise ConfigError(f"{flag} is {given}; expected 1 to {_MOST}.", "Give others.")
    if not rows and not prompts:
        rows, prompts = (
            (list(_GPU_ROWS), list(_GPU_PROMPTS)) if is_gpu else (list(_CPU_ROWS), [*_CPU_PROMPTS])
        )
    return [
        *(Point(decode_rows=count, context_tokens=context) for count in rows),
        *(Point(prompt_tokens=count) for count in prompts),
    ]


def _config(points: list[Point], **settings: Any) -> EngineConfig:
    from headrace.calibrate.engine_steps import engine_tokens
    from headrace.calibrate.steps import needed_tokens

    most_rows = max(point.decode_rows for point in points)
    return EngineConfig(
        kv_tokens=max(needed_tokens(points, 64), engine_tokens(most_rows, 64)),
        max_batch_tokens=max(512, *(point.batch_tokens for point in points)),
        max_sequences=max(2, most_rows),
        **settings,
    )


@contextmanager
def _loaded(target: str | None, config: EngineConfig, *, offline: bool) -> Iterator[Assembled]:
    from headrace.assemble import assemble

    loaded = assemble(target, config=config, offline=offline)
    try:
        yield loaded
    finally:
        loaded.close()


def _on_cpu(loaded: Assembled, asked: _Asked) -> _Found:
    from headrace.backends.cpu.runner import CpuRunner
    from headrace.calibrate.operations import cpu_peaks, profile_steps

    runner = loaded.runner
    assert isinstance(runner, CpuRunner)
    peaks = cpu_peaks(runner) if asked.profile is None else _peaks_of(asked.profile)
    vocab_size = loaded.spec.vocab_size
    return _Found(
        peaks=peaks, steps=profile_steps(runner, vocab_size, asked.points, asked.rounds, peaks)
    )


def _on_gpu(loaded: Assembled, asked: _Asked) -> _Found:
    from headrace.backends.cuda.runner import CudaRunner
    from headrace.calibrate.gpu_operations import (
        gpu_peaks,
        profile_gpu_steps,
        range_gpu_steps,
        sheet_of,
    )
    from headrace.hardware.this_machine import gpus_here

    runner = loaded.runner
    assert isinstance(runner, CudaRunner)
    steps = runner, loaded.spec.vocab_size, asked.points, asked.rounds
    if asked.nvtx:
        range_gpu_steps(*steps, asked.modes)
        return _Found(peaks=None, steps=[])
    peaks = gpu_peaks() if asked.profile is None else _peaks_of(asked.profile)
    known = [seen.gpu for seen in gpus_here() if seen.gpu is not None]
    return _Found(
        peaks=peaks,
        steps=profile_gpu_steps(*steps, peaks, asked.modes),
        sheet=sheet_of(known[0]) if known else None,
    )


def _peaks_of(profile: Path) -> Peaks:
    from headrace.calibrate.step_profile import Peaks
    from headrace.hardware.profile import load_profile

    ceilings = load_profile(profile).ceilings
    if ceilings is None:
        raise ConfigError(f"{profile} has no ceilings.", "Leave --profile out.")
    return Peaks(
        flops_s={name: 2 * rate for name, rate in ceilings.multiplies_s.items()},
        bytes_s=max(ceilings.read_bytes_s.values()),
        source=f"of {profile}",
    )


def _facts(name: str, found: _Found) -> dict[str, Any]:
    steps = []
    for step in found.steps:
        facts = asdict(step)
        facts.pop("slices")  # --trace has them
        facts["tokens_s"] = step.tokens_s
        for made, each in zip(facts["operations"], step.operations, strict=True):
            made["of_peak"] = each.of_peak
        steps.append(facts)
    peaks = None if found.peaks is None else asdict(found.peaks)
    return {"schema": SCHEMA, "model": name, "peaks": peaks, "steps": steps}
