"""Flags of `headrace plan` as a question and a space to search: lengths, rate, GPUs, prices.

Every refusal names the flag. Looks models and GPUs up; simulates nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.fits.model import find_model
from headrace.hardware.gpus import Gpu, all_gpus, find_gpu, find_price_kind
from headrace.hardware.profile import Profile, load_profile
from headrace.hardware.this_machine import NAME
from headrace.models.precision import check_tp, find_precision, tp_obstacle
from headrace.search.demand import lengths_of
from headrace.search.machine import Space, check_context, missing_type
from headrace.search.measured import read_measured
from headrace.search.models import FILE, PlannedModel, precisions_for
from headrace.search.question import Question
from headrace.simulate.engines import engines
from headrace.workload.arrivals import OpenLoop
from headrace.workload.named import find_workload
from headrace.workload.slo import Slo, parse_slo
from headrace.workload.trace import read_trace
from headrace.workload.workload import Synthetic, Workload, fixed, parse_lengths, summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags, as they were given."""

    models: tuple[str, ...]
    rps: float | None = None
    input: str | None = None
    output: str | None = None
    slo: str | None = None
    workload: str | None = None
    trace: Path | None = None
    measured: Path | None = None
    gpus: tuple[str, ...] = ()
    quants: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    tps: tuple[int, ...] = ()
    prices: tuple[str, ...] = ()
    price_kind: str = "on-demand"
    budget: float | None = None
    engine: str = "vllm"
    seed: int = 0
    profile: Path | None = None


def question_of(asked: Asked) -> tuple[Question, list[str]]:
    """And notes about what was taken from where."""
    workload, rate, notes = _workload(asked)
    slo = parse_slo(asked.slo) if asked.slo is not None else workload.slo
    if slo is None:
        slo = Slo(share=0.99)
        notes.append("no objective was given: a deployment only has to keep up with the requests")
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rps is {rate:g}; expected above 0.", "Set --rps to above 0.")
    if asked.budget is not None and asked.budget <= 0:
        raise ConfigError(
            f"--budget is {asked.budget:g}; expected US dollars a month, above 0.",
            "Set --budget to above 0, or leave it out.",
        )
    return Question(
        workload=workload,
        lengths=lengths_of(workload, asked.seed),
        rate=rate,
        slo=slo,
        seed=asked.seed,
        most_usd_month=math.inf if asked.budget is None else asked.budget,
    ), notes


def _workload(asked: Asked) -> tuple[Workload, float, list[str]]:
    ways = {
        "--input and --output": asked.input is not None or asked.output is not None,
        "--workload": asked.workload is not None,
        "--trace": asked.trace is not None,
        "--measured": asked.measured is not None,
    }
    given = [name for name, is_there in ways.items() if is_there]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise ConfigError(
            f"Expected one of --input and --output, --workload, --trace and --measured; found "
            f"{found}.",
            "Say how long requests are, as in --input 512 --output 300.",
        )
    if asked.trace is not None:
        return _from_trace(asked.trace, asked.rps)
    if asked.measured is not None:
        return _from_measured(asked.measured, asked.rps)
    if asked.workload is not None:
        named = find_workload(asked.workload)
        notes = []
        if not isinstance(named.arrivals, OpenLoop):
            named = replace(named, arrivals=OpenLoop(rate_s=1.0))
            notes = [f"{named.name} is a closed loop: planned as Poisson arrivals at --rps"]
        return named, _rate(asked.rps), notes
    if asked.input is None or asked.output is None:
        missing = "--input" if asked.input is None else "--output"
        raise ConfigError(f"{missing} is missing.", f"Give the tokens: {missing} 300.")
    return (
        Synthetic(
            name="fixed",
            prompts=parse_lengths(asked.input, "input"),
            outputs=parse_lengths(asked.output, "output"),
            arrivals=OpenLoop(rate_s=1.0),
        ),
        _rate(asked.rps),
        [],
    )


def _rate(rps: float | None) -> float:
    if rps is None:
        raise ConfigError(
            "--rps is missing: how many requests a second are to be served is not known.",
            "Give it, as in --rps 20.",
        )
    return rps


def _from_trace(path: Path, rps: float | None) -> tuple[Workload, float, list[str]]:
    trace = read_trace(path)
    if rps is not None:
        return trace, rps, []
    rate = summarize(trace.requests).rate_s
    if rate is None:
        raise ConfigError(f"{path} has no rate: all its requests come at once.", "Give --rps.")
    return trace, rate, [f"{path.name} has {rate:.3g} requests/s"]


def _from_measured(path: Path, rps: float | None) -> tuple[Workload, float, list[str]]:
    found = read_measured(path)
    mix = found.mix
    workload = Synthetic(
        name=path.name,
        prompts=fixed(max(1, round(mix.input_tokens))),
        outputs=fixed(max(1, round(mix.output_tokens))),
        arrivals=OpenLoop(rate_s=1.0),
    )
    rate = found.output_tokens_s / mix.output_tokens if rps is None else rps
    return workload, rate, list(found.notes)


def space_of(asked: Asked, question: Question) -> tuple[Space, list[str]]:
    models = tuple(planned(name, asked.quants) for name in dict.fromkeys(asked.models))
    return space_for(asked, question, models)


def space_for(
    asked: Asked, question: Question, models: tuple[PlannedModel, ...]
) -> tuple[Space, list[str]]:
    """Of models that were looked up before."""
    if asked.engine not in engines():
        raise ConfigError(
            f"--engine is {asked.engine[:40]!r}; step times are known for {', '.join(engines())}.",
            "Choose one of them.",
        )
    for model in models:
        check_context(model, question.lengths.longest_tokens)
    prices = _given_prices(asked)
    gpus, notes = _gpus(asked, prices)
    space = Space(models=models, gpus=gpus, engine=asked.engine, prices=prices)
    if asked.kv_dtypes:
        space = replace(space, kv_dtypes=tuple(dict.fromkeys(asked.kv_dtypes)))
    if asked.tps:
        space = replace(space, tps=tuple(sorted(set(asked.tps))))
    _check_types(asked, space)
    _check_tps(asked, space)
    return space, notes


def profile_of(asked: Asked, space: Space) -> tuple[Profile, PlannedModel] | None:
    """The measured machine, and which of the models it was measured with."""
    if asked.profile is None:
        if NAME in asked.gpus:
            raise ConfigError(
                f"--gpu is {NAME}, whose step times are not known.",
                "Measure it with `headrace calibrate MODEL --out FILE`, and add --profile FILE.",
                param="profile",
            )
        return None
    found = load_profile(asked.profile)
    name = str(found.model.get("name", ""))
    for model in space.models:
        if model.name.rpartition("/")[2].lower() in name.lower():
            return found, model
    raise ConfigError(
        f"{asked.profile} is a profile of {name}, and not of {', '.join(asked.models)}.",
        f"Run headrace calibrate {asked.models[0]} --out FILE, and give that file as --profile.",
        param="profile",
    )


def planned(name: str, quants: tuple[str, ...]) -> PlannedModel:
    found = find_model(name)
    return PlannedModel(
        name=found.name,
        spec=found.spec,
        precision=found.precision,
        precisions=precisions_for(found.precision, quants),
        weights=found.weights,
        stored_bytes=found.stored_bytes,
    )


def _given_prices(asked: Asked) -> dict[str, float]:
    prices: dict[str, float] = {}
    for text in asked.prices:
        name, equals, usd = text.partition("=")
        gpu = name if name == NAME else find_gpu(name).name
        try:
            prices[gpu] = float(usd)
        except ValueError:
            equals = ""
        if not equals or prices.get(gpu, -1.0) < 0:
            raise ConfigError(
                f"--price is {text[:40]!r}; expected GPU=USD per hour, such as h200-sxm=2.50.",
                "Give it so, once for each GPU.",
            )
    return prices


def _gpus(asked: Asked, prices: dict[str, float]) -> tuple[tuple[Gpu, ...], list[str]]:
    """Those that were named; otherwise all with a price. Prices that were not given are the
    table's."""
    kind = find_price_kind(asked.price_kind)
    named = [find_gpu(name) for name in asked.gpus if name != NAME]
    gpus = [gpu for gpu in named or all_gpus() if named or gpu.kind == "gpu"]
    if asked.gpus and not named:
        return (), []
    for gpu in gpus:
        if named and not _is_timed(gpu):
            raise ConfigError(
                f"Memory, bandwidth or rates of {gpu.name} are not known.",
                "Choose a GPU that `headrace gpus` shows with all of them.",
                param="gpu",
            )
        found = gpu.price(kind)
        if found is not None:
            prices.setdefault(gpu.name, found.usd_per_hour)
    if named:
        without = [gpu.name for gpu in gpus if gpu.name not in prices]
        notes = []
        if without:
            notes.append(
                f"no {kind} price of {', '.join(without)} is known: GPU-hours stand in for money; "
                "--price NAME=USD gives one"
            )
        return tuple(gpus), notes
    timed = [gpu for gpu in gpus if _is_timed(gpu)]
    chosen = tuple(gpu for gpu in timed if gpu.name in prices)
    left = len(timed) - len(chosen)
    notes = [
        f"{len(chosen)} kinds of GPUs with a price were looked at; {left} without one were not"
    ]
    return chosen, notes


def _is_timed(gpu: Gpu) -> bool:
    has_rate = "bf16" in gpu.flops or "fp16" in gpu.flops
    has_memory = gpu.memory_bytes is not None or gpu.nominal_bytes is not None
    return has_rate and has_memory and gpu.bandwidth_bytes_s is not None


def _check_tps(asked: Asked, space: Space) -> None:
    """Parallelism that was asked for and that divides none of the models is a mistake too."""
    if not asked.tps or not space.gpus:
        return
    pairs = [
        (model.spec, find_precision(model.counted_precision(precision)), tp)
        for model in space.models
        for precision in model.precisions
        for tp in space.tps
    ]
    if pairs and all(tp_obstacle(*pair) is not None for pair in pairs):
        check_tp(*pairs[0])


def _check_types(asked: Asked, space: Space) -> None:
    """A type that was asked for and that none of the GPUs has is a mistake, not a loser."""
    if not (asked.quants or asked.kv_dtypes):
        return
    from headrace.backends.demands import kv_value_bytes
    from headrace.search.machine import Machines

    for kv in asked.kv_dtypes:
        kv_value_bytes(kv)
    if FILE in asked.quants:
        raise ConfigError(
            "--quant is 'file', which is no type of weights.", "Leave --quant out for a file."
        )
    problems = []
    for candidate in Machines.all_of(space):
        gpu = next(gpu for gpu in space.gpus if gpu.name == candidate.gpu)
        model = next(model for model in space.models if model.name == candidate.model)
        problem = missing_type(gpu, model, candidate)
        if problem is None:
            return
        problems.append(problem)
    if problems:
        raise ConfigError(
            f"{problems[0]}.",
            "Use --quant int8 or awq and --kv-dtype bf16 there, or a GPU with that arithmetic: "
            "`headrace gpus` shows which have it.",
            param="quant",
        )
