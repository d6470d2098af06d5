"""The simulator against the running server on this machine.

    python benchmarks/planning/server.py [--model M] [--profile FILE] [--runs 3] [--scale 1]
        [--only WORDS ...] [--out FILE] [--markdown FILE] [--keep FILE]
    python benchmarks/planning/server.py --device cuda --shape llama-3.1-8b --least-s 8 --keep FILE
    python benchmarks/planning/server.py --profile FILE --kept FILE    # compare once more

Calibrates first, unless a profile is there. Then every workload of cases.py is served by `headrace
serve` in a process of its own, round after round, and simulated from the profile: throughput, TTFT
and TPOT, median and P99, and the requests a second that are served when more come than that.
Beside every error stands half of the range of the server's own runs. None of the workloads is one
that was calibrated with. The machine should do nothing else; --scale makes runs shorter or longer,
and --least-s has an open loop go on for so long. --keep writes the server's runs, with which
--kept makes the comparison without one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headrace.assemble import read_tokenizer
from headrace.calibrate.client import Server
from headrace.calibrate.run import calibrate, plain_ids
from headrace.core.config import Device, EngineConfig, LoadFormat
from headrace.fetch.resolve import resolve_model
from headrace.hardware.profile import Profile, load_profile
from headrace.simulate.profiled import setup_of
from headrace.simulate.replica import UNBOUNDED
from headrace.simulate.report import Report
from headrace.simulate.saturation import saturation
from headrace.simulate.serve import serve
from headrace.weights.load import open_weights
from headrace.workload.ask import Ask
from planning.cases import CASES, SATURATED, Case, Compared, compare, compared, markdown
from planning.kept import Runs, load_runs, place, save_runs
from planning.load import Load
from served_gpu import shape_folder
from shapes import SHAPES

TARGET_SATURATION = 0.05
MOST_CONNECTIONS = 1000  # that a server takes by default
WARM_S, WARM_SESSIONS = 1e4, 1_000_000


def vocabulary_of(options: argparse.Namespace) -> list[int]:
    with open_weights(resolve_model(options.model, offline=True), options.load_format) as file:
        tokenizer = read_tokenizer(file)
        return plain_ids(tokenizer, tokenizer.vocab_size)


def at_load(case: Case, profile: Profile, scale: float, least_s: float) -> list[Ask]:
    """The requests of a case. Its rate is a share of the simulated saturation."""
    count = max(8, round(case.requests * scale))
    if case.load is None:
        return list(case.workload.asks(0, count))
    rate = case.load * saturation(case.workload, setup_of(profile)).stable
    return list(case.workload.at_rate(rate).asks(0, max(count, round(rate * least_s))))


def run_server(server: Server, asks: Sequence[Ask], vocabulary: list[int], salt: str) -> Report:
    load = Load(server.port, vocabulary, salt)
    served = asyncio.run(load.run(asks))
    late = sorted(load.late_s)
    if late and late[int(0.99 * (len(late) - 1))] > 0.005:
        print(f"  note: the client was late by {late[-1] * 1e3:.1f} ms at worst", flush=True)
    return Report(served=tuple(served))


def simulated(asks: Sequence[Ask], profile: Profile) -> Report:
    """After a warm-up, as the server has had one: its scheduler has learnt what steps cost."""
    warm = CASES[1].workload.asks(9, 40)
    moved = [
        *(replace(ask, session=(ask.session or 0) + WARM_SESSIONS) for ask in warm),
        *(replace(ask, at_s=ask.at_s + WARM_S) for ask in asks),
    ]
    found = serve(moved, replace(setup_of(profile), queue=UNBOUNDED)).served
    kept = tuple(one for one in found if one.ask.at_s >= WARM_S)
    return Report(served=kept)


def at_once(profile: Profile, scale: float) -> list[Ask]:
    """More than can be served, all at one time: what is served then is the rate of saturation."""
    places = profile.limits.max_sequences
    count = max(places * 2, round(SATURATED.requests / 64 * places * scale))
    count = min(count, MOST_CONNECTIONS)
    drawn = SATURATED.workload.asks(0, count)
    return [replace(ask, at_s=0.0, session=None) for ask in drawn]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in the place of a model")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--profile",
        type=Path,
        nargs="+",
        default=[],
        help="calibrated before, else it is done now and written there; several: one for each run",
    )
    parser.add_argument("--calibrate-again", action="store_true", help="before every run")
    parser.add_argument("--seconds", type=float, default=120.0, help="of calibration")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--least-s", type=float, default=0.0, help="of an open loop")
    parser.add_argument("--warm", action="store_true", help="run a third of each before it counts")
    parser.add_argument("--budget-s", type=float, help="begin no round of runs after so long")
    parser.add_argument("--only", nargs="+", help="workloads whose names have one of these in them")
    parser.add_argument("--no-saturation", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--keep", type=Path, help="write the server's runs there")
    parser.add_argument("--kept", type=Path, help="the server's runs, in the place of a server")
    options = parser.parse_args()
    options.load_format = LoadFormat.AUTO
    if options.shape:
        options.model, options.load_format = str(shape_folder(options.shape)), LoadFormat.DUMMY
    return options


def main() -> None:
    began_s = time.monotonic()
    options = parse()
    until_s = began_s + options.budget_s if options.budget_s else math.inf
    if options.kept:
        profiles, runs = [load_profile(path) for path in options.profile], load_runs(options.kept)
    else:
        profiles, runs = served_runs(options, until_s)
    profile = profiles[0] if len(profiles) == 1 else blended(profiles)
    rows: list[Compared] = []
    notes = []
    for name, reports in runs.items():
        asks = [one.ask for one in sorted(reports[0].served, key=place)]
        made = simulated(asks, profile)
        if name != SATURATED.name:
            rows += compare(name, reports, made)
            continue
        rates = [report.requests_s for report in reports]
        rows.append(compared(name, "saturation", rates, made.requests_s, TARGET_SATURATION))
        bracket = saturation(SATURATED.workload, setup_of(profile))
        notes.append(f"simulated with Poisson arrivals it is saturated {bracket}")
    refused = sum(one.refused for each in runs.values() for one in each)
    notes.append(f"{refused} requests of the server's runs failed")
    text = markdown(rows, notes)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.out:
        options.out.write_text(json.dumps(_facts(rows, notes, profile), indent=1) + "\n")


def served_runs(options: argparse.Namespace, until_s: float) -> tuple[list[Profile], Runs]:
    """Every workload in every round, and the profiles that were measured in turn with them. No
    round is begun after `until_s`."""
    vocabulary = vocabulary_of(options)
    profiles = [_profile(options, 0)]
    profile = profiles[0]
    chosen = [
        case
        for case in CASES
        if not options.only or any(word in case.name for word in options.only)
    ]
    work = partial(at_load, profile=profile, scale=options.scale, least_s=options.least_s)
    with ProcessPoolExecutor(os.cpu_count()) as processes:  # each finds a rate of saturation
        asks = dict(zip((case.name for case in chosen), processes.map(work, chosen), strict=True))
    if not options.no_saturation:
        asks[SATURATED.name] = at_once(profile, options.scale)
    runs: Runs = {name: [] for name in asks}
    with Server(options.model, _flags(options)) as server:
        run_server(server, list(CASES[1].workload.asks(9, 40)), vocabulary, "warm up")
        if options.warm:
            for name, some in asks.items():
                run_server(server, some[: len(some) // 3], vocabulary, f"warm up {name}")
        for run in range(options.runs):
            if run and time.monotonic() > until_s:
                print(f"no time is left for run {run + 1}", flush=True)
                break
            if run and options.calibrate_again:
                profiles.append(_profile(options, run))
            for name, some in asks.items():
                print(f"run {run + 1}: {name}", flush=True)
                runs[name].append(run_server(server, some, vocabulary, f"{name} {run}"))
                if options.keep:
                    save_runs(options.keep, runs)
    return profiles, runs


def blended(profiles: Sequence[Profile]) -> Profile:
    """The machine as it was over all of them: the mean of each step, and of what serving added."""
    steps = []
    for some in zip(*(profile.steps for profile in profiles), strict=True):
        steps.append(replace(some[0], seconds=fmean(one.seconds for one in some)))
    served = [profile.serving for profile in profiles if profile.serving is not None]
    if len(served) < len(profiles):
        return replace(profiles[0], steps=tuple(steps))
    serving = replace(
        served[0],
        streams=tuple(
            replace(some[0], added_s=fmean(one.added_s for one in some))
            for some in zip(*(one.streams for one in served), strict=True)
        ),
        first_tokens=tuple(
            replace(
                some[0],
                added_s=fmean(one.added_s for one in some),
                busy_s=fmean(one.busy_s for one in some),
            )
            for some in zip(*(one.first_tokens for one in served), strict=True)
        ),
        burst_s=fmean(one.burst_s for one in served),
    )
    return replace(profiles[0], steps=tuple(steps), serving=serving)


def _flags(options: argparse.Namespace) -> list[str]:
    """As many may wait as are sent at once."""
    own = ["--device", options.device, "--load-format", options.load_format.value]
    return [*own, "--max-waiting-requests", "8192", "--max-waiting-tokens", "8000000"]


def _profile(options: argparse.Namespace, number: int) -> Profile:
    path = options.profile[number] if number < len(options.profile) else None
    if path is not None and path.exists():
        return load_profile(path)
    said: set[str] = set()

    def tell(what: str, done: int, total: int | None) -> None:
        if what not in said:
            said.add(what)
            print(f"calibrating: {what}", flush=True)

    made = calibrate(
        options.model,
        config=EngineConfig(device=Device(options.device), load_format=options.load_format),
        seconds=options.seconds,
        tell=tell,
        offline=True,
        flags=_flags(options),
    )
    if path is not None:
        made.save(path)
    return made


def _facts(rows: list[Compared], notes: list[str], profile: Profile) -> dict[str, Any]:
    return {
        "machine": dict(profile.machine),
        "model": dict(profile.model),
        "calibrated": profile.date,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
        "notes": notes,
    }


if __name__ == "__main__":
    main()
