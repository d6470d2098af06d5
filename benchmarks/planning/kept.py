"""Runs of a real server, kept in a file: what was asked, and when things happened to each request.

So a comparison with the simulator can be made again, on another machine and without the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.simulate.report import Report
from headrace.simulate.served import Served
from headrace.workload.ask import Ask

Runs = dict[str, list[Report]]  # by workload


def save_runs(path: Path, runs: Mapping[str, Sequence[Report]]) -> None:
    """Requests of the first run of a workload, and the times of each run's."""
    made = {}
    for name, reports in runs.items():
        if reports:
            ordered = [sorted(report.served, key=place) for report in reports]
            asks = [asdict(one.ask) for one in ordered[0]]
            made[name] = {"asks": asks, "runs": [[_times(s) for s in one] for one in ordered]}
    path.write_text(json.dumps(made, separators=(",", ":")) + "\n")


def load_runs(path: Path) -> Runs:
    found: Runs = {}
    for name, one in json.loads(path.read_text()).items():
        asks = [_ask(each) for each in one["asks"]]
        found[name] = [
            Report(
                served=tuple(
                    sorted(
                        (_served(ask, times) for ask, times in zip(asks, run, strict=True)),
                        key=lambda each: each.arrival_s,
                    )
                )
            )
            for run in one["runs"]
        ]
    return found


def place(one: Served) -> tuple[float, int, int]:
    """Of a request in the order in which they are asked, the same in every run."""
    return one.ask.at_s, one.ask.turn, one.ask.session or 0


def _times(one: Served) -> list[Any]:
    return [one.arrival_s, one.first_s, one.end_s, one.tokens, one.refused]


def _ask(fields: dict[str, Any]) -> Ask:
    shared = tuple((name, tokens) for name, tokens in fields.pop("shared"))
    return Ask(**fields, shared=shared)


def _served(ask: Ask, times: Sequence[Any]) -> Served:
    arrival_s, first_s, end_s, tokens, refused = times
    return Served(
        ask=ask,
        arrival_s=arrival_s,
        started_s=first_s,
        first_s=first_s,
        end_s=end_s,
        tokens=tokens,
        refused=refused,
    )
