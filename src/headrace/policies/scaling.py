"""How many replicas there should be: a function of what was seen and of rules.

The signal is work that waits (seconds of prefill for each replica), because it rises before
anything is late, and because completions look the same at any load above saturation. A latency that
is missed while nothing waits is not a matter of how many replicas there are, and adds none.
Replicas that are still starting count as if they were there. Values in, a number out: no clock, no
fleet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.core.checks import check_fields, refusal, within
from headrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    least: int = field(default=1, metadata=within(at_least=1))
    most: int = field(default=8, metadata=within(at_least=1))
    # Seconds of prefill that may wait at each replica before another one is added.
    waiting_s: float = field(default=0.25, metadata=within(above=0))
    # The share of places in use above which one is added, and below which one is taken away.
    busy: float = field(default=0.85, metadata=within(above=0, at_most=1))
    idle: float = field(default=0.5, metadata=within(at_least=0, at_most=1))
    calm_s: float = field(default=60.0, metadata=within(at_least=0))  # before one is taken away
    interval_s: float = field(default=5.0, metadata=within(above=0))  # between decisions

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.most < self.least:
            raise refusal(ConfigError, "most", self.most, f"{self.least} or more, which is `least`")
        if self.idle >= self.busy:
            raise refusal(ConfigError, "idle", self.idle, f"less than `busy`, {self.busy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSeen:
    """A fleet at one moment."""

    ready: int  # replicas that take requests
    starting: int  # that will
    waiting_prefill_s: float  # prompts without a first token, in seconds of one replica's work
    busy: float  # the share of ready replicas' places that are taken
    # How much of the time for a first token is left: (objective - p95) / objective; None: unknown.
    headroom: float | None = None
    calm_s: float = math.inf  # since replicas were last added or were needed


def wanted_replicas(rules: ScalingRules, seen: FleetSeen) -> int:
    """At most twice as many as there are, and at most one fewer."""
    there = max(1, seen.ready + seen.starting)
    waiting_s = seen.waiting_prefill_s / there
    if waiting_s > rules.waiting_s:
        wanted = min(2 * there, math.ceil(seen.waiting_prefill_s / rules.waiting_s))
    elif _is_short(rules, seen, there, waiting_s):
        wanted = there + 1
    elif _is_idle(rules, seen, there):
        wanted = there - 1
    else:
        wanted = there
    return min(max(wanted, rules.least), rules.most)


def _is_short(rules: ScalingRules, seen: FleetSeen, there: int, waiting_s: float) -> bool:
    if seen.busy * seen.ready > rules.busy * there:
        return True
    is_late = seen.headroom is not None and seen.headroom < 0
    return is_late and waiting_s > 0.1 * rules.waiting_s


def _is_idle(rules: ScalingRules, seen: FleetSeen, there: int) -> bool:
    """Whether one fewer would still have room."""
    if there < 2 or seen.starting or seen.calm_s < rules.calm_s:
        return False
    rest = there - 1
    return (
        seen.busy * seen.ready / rest < rules.idle
        and seen.waiting_prefill_s / rest < 0.1 * rules.waiting_s
    )
