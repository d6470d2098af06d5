"""Decides again and again how many replicas there should be: the memory that the rules need.

`scaling.py` has the rules, for one moment. This keeps what was decided and since when nothing was
needed, and sums up what replicas report. Values and times come in: no clock, no fleet. Whatever
runs replicas (Ray Serve, a test) asks it as often as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.policies.scaling import FleetSeen, ScalingRules, wanted_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSeen:
    """What one replica says about itself; None: it can't say yet."""

    pending_prefill_s: float | None = None
    saturation: float | None = None  # 0 to 1
    headroom: float | None = None  # below 0: it misses its objective


class Scaler:
    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self._decided_s: float | None = None
        self._needed_s: float | None = None  # when replicas were last added, or were not idle

    def decide(
        self, now_s: float, seen: Sequence[ReplicaSeen], *, target: int, unplaced: int = 0
    ) -> int:
        """How many there should be. `seen` are those that take requests, `target` is what was
        wanted before, `unplaced` are requests that no replica took. Between decisions `target`
        stays."""
        if self._decided_s is not None and now_s - self._decided_s < self.rules.interval_s:
            return target
        if len(seen) > target:
            return target  # one is on its way out: its room must not be counted
        self._decided_s = now_s
        if self._needed_s is None:
            self._needed_s = now_s
        fleet = fleet_seen(
            seen,
            starting=max(0, target - len(seen)),
            unplaced=unplaced,
            calm_s=now_s - self._needed_s,
        )
        wanted = wanted_replicas(self.rules, fleet)
        if wanted < target and not seen:
            return target  # nobody has reported: that is not the same as idle
        if wanted > target or not self._could_spare_one(fleet):
            self._needed_s = now_s
        elif wanted < target:
            self._needed_s = now_s  # one at a time
        return wanted

    def _could_spare_one(self, fleet: FleetSeen) -> bool:
        there = fleet.ready + fleet.starting
        calm = FleetSeen(
            ready=fleet.ready,
            starting=0,
            waiting_prefill_s=fleet.waiting_prefill_s,
            busy=fleet.busy,
            headroom=fleet.headroom,
        )
        return there > self.rules.least and wanted_replicas(self.rules, calm) < fleet.ready


def fleet_seen(
    seen: Sequence[ReplicaSeen], *, starting: int, unplaced: int, calm_s: float
) -> FleetSeen:
    """A replica that can't say how full it is counts as idle: it has just started."""
    full = [1.0 if unplaced else each.saturation or 0.0 for each in seen]
    rooms = [each.headroom for each in seen if each.headroom is not None]
    return FleetSeen(
        ready=len(seen),
        starting=starting,
        waiting_prefill_s=sum(each.pending_prefill_s or 0.0 for each in seen),
        busy=sum(full) / len(full) if full else 0.0,
        headroom=min(rooms, default=None),
        calm_s=calm_s,
    )
