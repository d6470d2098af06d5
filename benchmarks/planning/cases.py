"""Workloads that the simulator is compared on with the running server, and errors between the two.

None of them is what `headrace calibrate` measures with. Rates are shares of the rate at which the
simulated server is saturated, so that they mean the same on every machine. Knows workloads and
reports; no server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from headrace.simulate.report import Report
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.distribution import Exponential, Lognormal, Uniform
from headrace.workload.workload import Lengths, Synthetic, fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    workload: Synthetic
    load: float | None  # of saturation; None: a closed loop
    requests: int


def _closed(name: str, clients: int, prompt: int, output: int, requests: int) -> Case:
    made = Synthetic(
        prompts=fixed(prompt), outputs=fixed(output), arrivals=ClosedLoop(clients=clients)
    )
    return Case(name=name, workload=made, load=None, requests=requests)


def _open(name: str, load: float, made: Synthetic, requests: int = 120) -> Case:
    return Case(name=name, workload=made, load=load, requests=requests)


_PLAIN = Synthetic(prompts=fixed(128), outputs=fixed(64), arrivals=OpenLoop(rate_s=1.0))
_MIXED = replace(
    _PLAIN,
    prompts=Lengths(Lognormal(200, 1.0), least=8, most=1500),
    outputs=Lengths(Lognormal(60, 0.8), least=4, most=300),
)
_SHARED = replace(_PLAIN, prompts=fixed(40), outputs=fixed(32), prefixes=2, prefix_tokens=512)
_SESSIONS = replace(
    _PLAIN,
    prompts=Lengths(Uniform(40, 120)),
    outputs=Lengths(Uniform(16, 64)),
    prefixes=1,
    prefix_tokens=96,
    turns=fixed(4),
    follow_ups=Lengths(Uniform(8, 40)),
    waits=Exponential(1.0),
)

SATURATED = _open("saturation, 128/64", 1.0, _PLAIN, 240)
CASES: tuple[Case, ...] = (
    _closed("closed 1, 128/64", 1, 128, 64, 24),
    _closed("closed 4, 128/64", 4, 128, 64, 48),
    _closed("closed 16, 128/64", 16, 128, 64, 96),
    _closed("closed 32, 24/128", 32, 24, 128, 96),
    _closed("closed 4, 900/16", 4, 900, 16, 40),
    _open("Poisson 30%, 128/64", 0.3, _PLAIN),
    _open("Poisson 60%, 128/64", 0.6, _PLAIN),
    _open("Poisson 85%, 128/64", 0.85, _PLAIN, 180),
    _open("constant 60%, 64/64", 0.6, replace(_PLAIN, prompts=fixed(64),
          arrivals=OpenLoop(rate_s=1.0, cv=0.0))),
    _open("gamma cv 2 50%, 128/64", 0.5, replace(_PLAIN, arrivals=OpenLoop(rate_s=1.0, cv=2.0))),
    _open("Poisson 60%, mixed lengths", 0.6, _MIXED),
    _open("Poisson 50%, 700/24", 0.5, replace(_PLAIN, prompts=fixed(700), outputs=fixed(24))),
    _open("Poisson 60%, shared prefixes", 0.6, _SHARED),
    _open("sessions 50%, 4 turns", 0.5, _SESSIONS),
)  # fmt: skip


def _latency(name: str, percentile: str) -> Callable[[Report], float | None]:
    def of(report: Report) -> float | None:
        found = getattr(report, name)
        return None if found is None else float(getattr(found, percentile))

    return of


# name -> (what it is of a report, the error that is aimed at)
MEASURES: dict[str, tuple[Callable[[Report], float | None], float]] = {
    "tokens/s": (lambda report: report.output_tokens_s, 0.025),
    "TTFT p50": (_latency("ttft_s", "p50"), 0.06),
    "TPOT p50": (_latency("tpot_s", "p50"), 0.06),
    "TTFT p99": (_latency("ttft_s", "p99"), 0.15),
    "TPOT p99": (_latency("tpot_s", "p99"), 0.15),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one case. `spread` is half of the range of the server's runs over their
    median."""

    case: str
    measure: str
    served: float
    spread: float
    simulated: float
    target: float

    @property
    def error(self) -> float:
        return self.simulated / self.served - 1

    @property
    def is_within(self) -> bool:
        return abs(self.error) <= self.target


def compare(case: str, served: Sequence[Report], simulated: Report) -> list[Compared]:
    """With the median over the server's runs."""
    found = []
    for name, (of, target) in MEASURES.items():
        real = [value for report in served if (value := of(report))]
        made = of(simulated)
        if real and made:
            found.append(compared(case, name, real, made, target))
    return found


def compared(
    case: str, measure: str, real: Sequence[float], made: float, target: float
) -> Compared:
    middle = median(real)
    return Compared(
        case=case,
        measure=measure,
        served=middle,
        spread=(max(real) - min(real)) / 2 / middle,
        simulated=made,
        target=target,
    )


def markdown(rows: Sequence[Compared], notes: Sequence[str]) -> str:
    """All rows, the server's own spread beside every error; bold: not within its target."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    lines = ["| workload | " + " | ".join(measures) + " |", "|---|" + "---:|" * len(measures)]
    for case in dict.fromkeys(row.case for row in rows):
        cells = {row.measure: _cell(row) for row in rows if row.case == case}
        lines.append(f"| {case} | " + " | ".join(cells.get(m, "") for m in measures) + " |")
    lines.append("")
    for measure in measures:
        some = [row for row in rows if row.measure == measure]
        within = sum(row.is_within for row in some)
        middle = median(abs(row.error) for row in some)
        lines.append(
            f"- {measure}: {within} of {len(some)} within {some[0].target:.1%}, median error "
            f"{middle:.1%}, the server's own spread {median(row.spread for row in some):.1%}"
        )
    return "\n".join([*lines, *(f"- {note}" for note in notes)]) + "\n"


def _cell(row: Compared) -> str:
    shown = f"{row.error:+.1%}"
    value = f"{row.served:.1f}" if row.measure == "tokens/s" else _seconds(row)
    return f"{value} ±{row.spread:.1%}, {shown if row.is_within else f'**{shown}**'}"


def _seconds(row: Compared) -> str:
    if row.measure.startswith("T"):
        return f"{row.served * 1e3:.1f} ms"
    return f"{row.served:.3g}"
