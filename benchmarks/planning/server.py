"""The simulator against the running server on this machine.

    python benchmarks/planning/server.py [--model M] [--profile FILE] [--runs 3] [--scale 1]
        [--only WORDS ...] [--out FILE] [--markdown FILE]

Calibrates first, unless a profile is given. Then every workload of cases.py is served by `headrace
serve` in a process of its own, round after round, and simulated from the profile: throughput, TTFT
and TPOT, median and P99, and the requests a second that are served when more come than that.
Beside every error stands half of the range of the server's own runs. None of the workloads is one
that was calibrated with. The machine should do nothing else; --scale makes runs shorter or longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headrace.assemble import read_tokenizer
from headrace.calibrate.client import Server
from headrace.calibrate.run import calibrate, plain_ids
from headrace.core.config import EngineConfig
from headrace.fetch.resolve import resolve_model
from headrace.hardware.profile import Profile, load_profile
from headrace.simulate.profiled import setup_of
from headrace.simulate.report import Report
from headrace.simulate.saturation import saturation
from headrace.simulate.serve import serve
from headrace.weights.load import open_weights
from headrace.workload.ask import Ask
from planning.cases import CASES, SATURATED, Case, Compared, compare, compared, markdown
from planning.load import Load

TARGET_SATURATION = 0.05
WARM_S, WARM_SESSIONS = 1e4, 1_000_000


def vocabulary_of(model: str | None) -> list[int]:
    with open_weights(resolve_model(model, offline=True)) as file:
        tokenizer = read_tokenizer(file)
        return plain_ids(tokenizer, tokenizer.vocab_size)


def at_load(case: Case, profile: Profile, scale: float) -> list[Ask]:
    """The requests of a case. Its rate is a share of the simulated saturation."""
    count = max(8, round(case.requests * scale))
    if case.load is None:
        return list(case.workload.asks(0, count))
    rate = case.load * saturation(case.workload, setup_of(profile)).stable
    return list(case.workload.at_rate(rate).asks(0, count))


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
    found = serve(moved, setup_of(profile)).served
    kept = tuple(one for one in found if one.ask.at_s >= WARM_S)
    return Report(served=kept)


def at_once(scale: float) -> list[Ask]:
    """More than can be served, all at one time: what is served then is the rate of saturation."""
    count = max(60, round(SATURATED.requests * scale))
    drawn = SATURATED.workload.asks(0, count)
    return [replace(ask, at_s=0.0, session=None) for ask in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--profile", type=Path, help="calibrated before; else it is done now")
    parser.add_argument("--seconds", type=float, default=120.0, help="of calibration")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--only", nargs="+", help="workloads whose names have one of these in them")
    parser.add_argument("--no-saturation", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    profile = _profile(options)
    vocabulary = vocabulary_of(options.model)
    chosen = [
        case for case in CASES if not options.only or any(w in case.name for w in options.only)
    ]
    asks = {case.name: at_load(case, profile, options.scale) for case in chosen}
    real: dict[str, list[Report]] = {case.name: [] for case in chosen}
    burst = [] if options.no_saturation else at_once(options.scale)
    bursts: list[Report] = []
    rows: list[Compared] = []
    with Server(options.model) as server:
        run_server(server, list(CASES[1].workload.asks(9, 40)), vocabulary, "warm up")
        for run in range(options.runs):
            for case in chosen:
                print(f"run {run + 1}: {case.name}", flush=True)
                salt = f"{case.name} {run}"
                real[case.name].append(run_server(server, asks[case.name], vocabulary, salt))
            if burst:
                print(f"run {run + 1}: {SATURATED.name}", flush=True)
                bursts.append(run_server(server, burst, vocabulary, f"saturation {run}"))
    for case in chosen:
        rows += compare(case.name, real[case.name], simulated(asks[case.name], profile))
    notes = []
    if bursts:
        rates = [report.requests_s for report in bursts]
        made = simulated(burst, profile).requests_s
        rows.append(compared(SATURATED.name, "saturation", rates, made, TARGET_SATURATION))
        bracket = saturation(SATURATED.workload, setup_of(profile))
        notes.append(f"simulated with Poisson arrivals it is saturated {bracket}")
    refused = sum(one.refused for each in (*real.values(), bursts) for one in each)
    notes.append(f"{refused} requests of the server's runs failed")
    text = markdown(rows, notes)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.out:
        options.out.write_text(json.dumps(_facts(rows, notes, profile), indent=1) + "\n")


def _profile(options: argparse.Namespace) -> Profile:
    if options.profile is not None and options.profile.exists():
        return load_profile(options.profile)
    said: set[str] = set()

    def tell(what: str, done: int, total: int | None) -> None:
        if what not in said:
            said.add(what)
            print(f"calibrating: {what}", flush=True)

    made = calibrate(
        options.model,
        config=EngineConfig(),
        seconds=options.seconds,
        tell=tell,
        offline=True,
    )
    if options.profile is not None:
        made.save(options.profile)
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
