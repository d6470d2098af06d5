"""`headrace simulate`: a workload on a virtual clock, on a machine that was calibrated or on GPUs.

Reads options and shows a report; simulate/ has the engine on a virtual clock, workload/ the
requests. simulate_asked.py checks the flags, simulate_machine.py makes a replica of them and
simulate_text.py writes what was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.calibrate import DEFAULT_OUT
from headrace.cli.options import AsJson
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cli.simulate_asked import AskedWorkload, Fleet
    from headrace.cli.simulate_machine import AskedGpu, Machine
    from headrace.cli.simulate_text import Answer, Run
    from headrace.simulate.report import Report
    from headrace.simulate.verdict import Bracket
    from headrace.workload.ask import Ask
    from headrace.workload.slo import Slo
    from headrace.workload.workload import Workload

FIRST_REQUESTS = 300  # or more, until a verdict is clear
MOST_TRIED = 20_000
MOST_REQUESTS = 200_000
THIS_MACHINE = ("this-machine", "here")


def simulate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="With --gpu as `headrace fit` takes it; else the one that the profile must be of.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help=f"What headrace calibrate wrote; without --gpu: {DEFAULT_OUT}."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="As `headrace gpus` names it, in place of a profile.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="All of them: tp x replicas.")] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="GPUs of one replica; default: all of them.")
    ] = None,
    quant: Annotated[
        str | None, typer.Option(help="Type of the weights; default: the checkpoint's.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of keys and values; default: bf16.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Whose step times: vllm (default), sglang, trtllm, headrace.")
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Of one replica of GPUs; default: 256.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a step, of GPUs; default: 8192.")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Of GPUs.")
    ] = True,
    replicas: Annotated[int | None, typer.Option(min=1, help="Behind a router.")] = None,
    router: Annotated[
        str | None,
        typer.Option(help="least-pending (default), round-robin, random, prefix or session."),
    ] = None,
    prefill_replicas: Annotated[
        int | None, typer.Option(min=1, help="Replicas that only compute prompts, and ...")
    ] = None,
    decode_replicas: Annotated[
        int | None, typer.Option(min=1, help="... those that continue them: two pools.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Between the pools, of each GPU: 50GB/s; default: the GPU's own link."),
    ] = None,
    autoscale: Annotated[
        str | None, typer.Option(help="LEAST:MOST replicas, such as 1:8, from --replicas on.")
    ] = None,
    cold_start: Annotated[
        str | None, typer.Option(help="With --autoscale: until a new replica serves, as in 90s.")
    ] = None,
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
    rate: Annotated[
        float | None, typer.Option("--rate", "--rps", help="Requests a second, of all users.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="How many; default: 300, or more until a verdict is clear.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Guess tokens, of which this share is right: docs/speculation.md."),
    ] = None,
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
    """Simulate requests on the machine that a profile was measured on, or on GPUs by name.

    Runs this engine, its scheduler and its prefix cache on a virtual clock. Exits with 0 if the
    objective is met (or none is given and the server keeps up), 1 if not, 2 for bad input.
    """
    from headrace.cli.simulate_asked import AskedFleet, AskedWorkload, make_fleet
    from headrace.cli.simulate_machine import AskedGpu, guessing
    from headrace.cli.simulate_text import answer_facts, explained, lines

    asked = AskedWorkload(
        workload=workload, trace=trace, input=input_lengths, output=output_lengths,
        arrivals=arrivals, rate=rate,
    )  # fmt: skip
    fleet = make_fleet(
        AskedFleet(
            gpus=gpus, tp=tp, replicas=replicas, prefill_replicas=prefill_replicas,
            decode_replicas=decode_replicas, router=router, link=link, autoscale=autoscale,
            cold_start=cold_start,
        )
    )  # fmt: skip
    if requests is not None and not 1 <= requests <= MOST_REQUESTS:
        raise ConfigError(f"--requests is {requests}; expected 1 to {MOST_REQUESTS}.")
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise ConfigError(f"--acceptance is {acceptance}; expected 0 to 1.", "Give a share.")
    if gpu is not None and gpu.lower() in THIS_MACHINE:
        gpu = None
    on_gpu = None
    if gpu is None:
        _check_profile_flags(
            {
                "--gpus": gpus, "--tp": tp, "--quant": quant, "--kv-dtype": kv_dtype,
                "--engine": engine, "--max-sequences": max_sequences,
                "--max-batch-tokens": max_batch_tokens, "--no-prefix-cache": not prefix_cache,
                "--decode-replicas": decode_replicas,
            }
        )  # fmt: skip
    elif profile is not None:
        raise ConfigError(
            f"--profile and --gpu {gpu} both say what to simulate; expected one.",
            "Leave one of them out.",
            param="profile",
        )
    else:
        on_gpu = AskedGpu(
            gpu=gpu, quant=quant, kv_dtype=kv_dtype, engine=engine, max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens, prefix_cache=prefix_cache,
        )  # fmt: skip
    described, objective, machine = _machine(
        model, profile or DEFAULT_OUT, on_gpu, asked, slo, fleet, seed
    )
    if acceptance is not None:
        machine = guessing(machine, acceptance)
    answer = _answer(machine, fleet, described, objective, requests, seed, saturation=saturation)
    if as_json:
        typer.echo(json.dumps(answer_facts(answer), indent=2))
    else:
        typer.echo("\n".join([*lines(answer), *(explained(answer) if explain else ())]))
    raise typer.Exit(0 if answer.is_good else 1)


def _check_profile_flags(flags: dict[str, object]) -> None:
    given = [name for name, value in flags.items() if value]
    if given:
        raise ConfigError(
            f"{given[0]} is given without --gpu; a profile has its own.",
            "Name a GPU, as in --gpu h200-sxm, or leave it out.",
            param=given[0].removeprefix("--").replace("-", "_"),
        )


def _machine(
    model: str | None,
    profile: Path,
    on_gpu: AskedGpu | None,
    asked: AskedWorkload,
    slo: str | None,
    fleet: Fleet,
    seed: int,
) -> tuple[Workload, Slo | None, Machine]:
    """And the requests and the objective, which depend on the model's context."""
    from headrace.cli import simulate_machine as machines
    from headrace.cli.simulate_asked import make_workload
    from headrace.workload.slo import Slo, parse_slo

    given = None if slo is None else parse_slo(slo)
    if on_gpu is None:
        found = machines.load(profile, model)
        described = make_workload(asked, found.limits.context_tokens)
        return described, given or described.slo, machines.measured_machine(found)
    if model is None:
        raise ConfigError(
            f"--gpu is {on_gpu.gpu}, and no MODEL was given.", "Name one, as in llama-3.1-8b."
        )
    planned = machines.planned_model(model, on_gpu.quant)
    described = make_workload(asked, planned.spec.context_tokens)
    objective = given or described.slo
    machine = machines.gpu_machine(
        on_gpu, planned, described, objective or Slo(share=0.99), fleet, seed
    )
    return described, objective, machine


def _answer(
    machine: Machine,
    fleet: Fleet,
    described: Workload,
    slo: Slo | None,
    requests: int | None,
    seed: int,
    *,
    saturation: bool,
) -> Answer:
    from headrace.cli.simulate_text import Answer, Run
    from headrace.workload.trace import Trace

    def run(slowness: float, count: int) -> Run:
        lateness = 1.0 if machine.band is None else machine.band.first(slowness)
        report = _server(machine, fleet, slo, slowness, seed)(described.asks(seed, count))
        return Run(report=report, slowness=slowness, lateness=lateness)

    count = requests or (MOST_REQUESTS if isinstance(described, Trace) else FIRST_REQUESTS)
    middle = run(1.0, count)
    while (
        middle.report.verdict == "unclear"
        and requests is None
        and not isinstance(described, Trace)
        and count < MOST_TRIED
    ):
        count = min(MOST_TRIED, 4 * count)
        middle = run(1.0, count)
    ends = None
    if machine.band is not None:
        ends = (run(machine.band.fast, count), run(machine.band.slow, count))
    bracket = _bracket(machine, fleet, described, slo, seed) if saturation else None
    return Answer(machine=machine, fleet=fleet, slo=slo, middle=middle, ends=ends, bracket=bracket)


def _server(
    machine: Machine, fleet: Fleet, slo: Slo | None, slowness: float, seed: int
) -> Callable[[Iterable[Ask]], Report]:
    from headrace.cli.simulate_machine import fleet_setup
    from headrace.simulate.fleet import serve_fleet
    from headrace.simulate.serve import serve
    from headrace.workload.slo import Slo

    if fleet.is_one:
        setup = machine.setup(slowness)
        return lambda asks: serve(asks, setup)
    made = fleet_setup(machine, fleet, slowness, seed, slo or Slo(share=0.99))
    return lambda asks: serve_fleet(asks, made)


def _bracket(
    machine: Machine, fleet: Fleet, described: Workload, slo: Slo | None, seed: int
) -> Bracket:
    from headrace.simulate.saturation import saturation

    if fleet.scaling is not None:
        raise ConfigError(
            "--saturation is given with --autoscale: the rate depends on how many there are.",
            f"Look at the most: --replicas {fleet.scaling.most} without --autoscale.",
            param="saturation",
        )
    return saturation(
        described,
        machine.setup(1.0),
        seeds=(seed, seed + 1, seed + 2),
        replicas=fleet.replicas,
        run=None if fleet.is_one else _server(machine, fleet, slo, 1.0, seed),
    )
