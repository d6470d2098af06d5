"""`--sweep` and `--hold` on a session: what to try, for how long, and where to stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.bench.run import SPENT, Progress, Stop
from headrace.bench.session import INTERRUPTED, Session
from headrace.bench.summary import Summary
from headrace.bench.sweep import Bracket, Point, bracket, judge_point, saturated_so_far
from headrace.client.connection import Unreachable
from headrace.core.errors import ConfigError
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.workload import Synthetic, Workload

_ALONE = 4  # requests, one at a time, before the first rate
_STEP_DOWN = 0.93
_MOST_HELD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    bracket: Bracket  # of at least one rate
    held: Point | None = None  # where --hold stayed
    ended_by: str = ""  # why it ended before its time; empty: it did not

    @property
    def best(self) -> Point:
        """Where it stayed, else the highest rate that was kept, else what was tried last."""
        kept = [point for point in self.bracket.points if point.is_kept]
        highest = max(kept, key=lambda point: point.rate_s, default=self.bracket.points[-1])
        return self.held or highest


async def climb(
    session: Session,
    workload: Workload,
    *,
    point_s: float,
    hold_s: float | None,
    on_point: Callable[[Point], None] = lambda point: None,
) -> Climbed:
    """Rates of `point_s` seconds each. With `hold_s`, the objective decides, and the highest rate
    that met it is kept up for so long; it goes down a little where it does not last."""
    if hold_s is not None and session.asked.slo is None:
        raise ConfigError("--hold needs an objective.", "Give --slo, such as ttft=500ms,tpot=50ms.")
    rates = _Rates(session, _open(workload), hold_s is not None, on_point)
    found = await bracket(
        lambda rate_s: rates.tried(rate_s, point_s),
        await _first_rate(session, workload),
        goes_on=lambda: rates.goes_on,
    )
    if not found.points:
        raise Unreachable(rates.ended_by)
    held = None
    if hold_s is not None and found.low_s is not None and rates.goes_on:
        rate_s = found.low_s
        for _ in range(_MOST_HELD):
            held = await rates.tried(rate_s, hold_s) or held
            if held is None or held.is_kept or not rates.goes_on:
                break
            rate_s *= _STEP_DOWN
    ended_by = rates.ended_by or (INTERRUPTED if session.is_interrupted else "")
    return Climbed(bracket=found, held=held, ended_by=ended_by)


class _Rates:
    """Tries rates for as long as there is an endpoint, money and patience."""

    def __init__(
        self,
        session: Session,
        workload: Workload,
        by_objective: bool,
        on_point: Callable[[Point], None],
    ) -> None:
        self._session = session
        self._workload = workload
        self._by_objective = by_objective
        self._on_point = on_point
        self.ended_by = ""

    @property
    def goes_on(self) -> bool:
        return not self.ended_by and not self._session.is_interrupted

    async def tried(self, rate_s: float, seconds: float) -> Point | None:
        """None: the endpoint is gone."""
        seen: list[float] = []  # when the run was stopped, if it was

        def enough(progress: Progress) -> bool:
            if progress.elapsed_s < seconds and saturated_so_far(progress, rate_s):
                seen.append(progress.elapsed_s)
                return True
            return False

        session = self._session
        try:
            summary = await session.measure(
                self._workload.at_rate(rate_s), Stop(duration_s=seconds), warm_up=0, enough=enough
            )
            if summary.has_given_up:  # by too much load, or is it gone?
                await session.check()
        except Unreachable as error:
            self.ended_by = error.cause
            return None
        if summary.ended_by == SPENT:
            self.ended_by = SPENT
        point = judge_point(
            rate_s, summary, seen[0] if seen else seconds, by_objective=self._by_objective
        )
        self._on_point(point)
        return point


def _open(workload: Workload) -> Workload:
    if isinstance(workload, Synthetic) and isinstance(workload.arrivals, ClosedLoop):
        return replace(workload, arrivals=OpenLoop(rate_s=1.0))
    return workload


async def _first_rate(session: Session, workload: Workload) -> float:
    """As many as one client alone sends: every endpoint keeps up with about that."""
    if not isinstance(workload, Synthetic):
        return max(0.01, 1 / await _alone_s(session, workload))
    alone = await _alone_s(session, workload.with_clients(1))
    return 1 / alone


async def _alone_s(session: Session, workload: Workload) -> float:
    summary: Summary = await session.measure(workload, Stop(requests=_ALONE), warm_up=1)
    if not summary.good:
        raise ConfigError("No request succeeded, so there is no rate to begin with.")
    return sum(one.service_s for one in summary.good) / len(summary.good)
