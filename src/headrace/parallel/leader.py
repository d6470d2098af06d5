"""The first rank's runner: every plan goes to the other ranks before it is computed here.

They obey in order, and meet this rank in the collectives of the step. Followers answer nothing: if
one is gone, a collective fails, and the runner is lost. Knows plans; no model, no backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from headrace.core.errors import DeviceLostError, HeadraceError
from headrace.core.ranks import Ranks
from headrace.core.step import Runner, RunnerLimits, StepPlan, StepResult
from headrace.parallel.channel import Channel, Close, Collect, Submit
from headrace.parallel.plans import PlanReader, PlanWriter


class Followers(Protocol):
    @property
    def channels(self) -> Sequence[Channel]: ...

    def close(self) -> None: ...


class LeadingRunner:
    def __init__(self, runner: Runner, team: Followers, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._team, self._followers = team, team.channels
        self._writer = PlanWriter(runner.limits.max_sequences)

    @property
    def limits(self) -> RunnerLimits:
        return self._runner.limits

    @property
    def progress(self) -> int:
        return self._runner.progress

    def submit(self, plan: StepPlan) -> None:
        self._order(Submit(self._writer.write(plan)))
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        self._order(Collect())
        return self._runner.collect()

    def close(self) -> None:
        for follower in self._followers:
            with contextlib.suppress(OSError):  # it is gone already
                follower.send(Close())
        self._runner.close()
        self._ranks.close()
        self._team.close()

    def _order(self, order: Submit | Collect) -> None:
        try:
            for follower in self._followers:
                follower.send(order)
        except OSError as error:
            raise DeviceLostError(
                f"A rank of this engine is gone: {error}.",
                "The engine starts again with all of its ranks.",
            ) from error


def follow(runner: Runner, orders: Channel) -> None:
    """What the other ranks do, until they are told to end, or the first rank is gone."""
    reader = PlanReader(runner.limits.max_sequences)
    while True:
        try:
            order = orders.receive_any()
        except (EOFError, OSError):
            return
        if not isinstance(order, Submit | Collect):
            return
        try:
            if isinstance(order, Submit):
                runner.submit(reader.read(order.plan))
            else:
                runner.collect()
        except DeviceLostError:
            return
        except HeadraceError:
            pass  # the first rank refuses the same plan, and says so
