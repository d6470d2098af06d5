"""A replica as a profile measured it: the machine that was calibrated, on a virtual clock.

What a served step takes beside the step itself was measured with clients that stream: the engine's
scheduling and committing, sending tokens to the HTTP process, and what HTTP process and clients
take from the processors that compute. All of it is by the number of rows that draw a token. The way
of a request in and of a token out comes from first tokens; the HTTP process takes in one request
after the other. Nothing here is fitted to a workload.
Knows profiles and plans; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from headrace.core.config import SchedulerConfig
from headrace.core.step import RunnerLimits, StepPlan
from headrace.hardware.profile import Profile, Serving, StreamTime
from headrace.simulate.cost import Cost
from headrace.simulate.curve import Curve, Line
from headrace.simulate.replica import Edge, Setup


def setup_of(profile: Profile, *, config: SchedulerConfig | None = None) -> Setup:
    """`config` is how the engine is set; None: as it was when it was measured."""
    limits = profile.limits
    curve = Curve(profile.steps, limits.padded_tokens)
    schedule = _line({one.decode_rows: one.schedule_s for one in profile.host})
    commit = _line({one.decode_rows: one.commit_s for one in profile.host})
    rest = publish = _line({})
    serving, edge = profile.serving, Edge()
    if serving is not None and serving.streams:
        is_hidden = limits.steps_in_flight > 1
        added = {
            one.streams: _added_behind(one) if is_hidden else _added(one, schedule, commit)
            for one in serving.streams
        }
        publish = _line({rows: sent_s for rows, (sent_s, _) in added.items()})
        rest = _line({rows: rest_s for rows, (_, rest_s) in added.items()})
        first_s = schedule(1) + commit(1) + publish(1) + rest(1)
        edge = _edge(serving, first_s)
    return Setup(
        limits=RunnerLimits(
            max_batch_tokens=limits.max_batch_tokens,
            max_sequences=limits.max_sequences,
            total_blocks=limits.total_blocks,
            block_tokens=limits.block_tokens,
            context_tokens=limits.context_tokens,
            steps_in_flight=max(1, limits.steps_in_flight),
            padded_tokens=limits.padded_tokens,
        ),
        cost=_cost(curve, rest),
        host=lambda plan: schedule(len(plan)),
        result=lambda plan: commit(len(plan)) + publish(_drawing(plan)),
        config=config or SchedulerConfig(max_step_growth=limits.max_step_growth),
        edge=edge,
    )


def _cost(curve: Curve, rest: Line) -> Cost:
    def cost(plan: StepPlan) -> float:
        return curve(plan) + rest(_drawing(plan))

    return cost


def _drawing(plan: StepPlan) -> int:
    """Rows that draw a token."""
    return len(plan.draws) - plan.draws.count(None)


def _line(points: Mapping[int, float]) -> Line:
    """From nothing at no rows; zero everywhere without points."""
    return Line({0.0: 0.0} | {float(rows): seconds for rows, seconds in points.items()})


def _added(one: StreamTime, schedule: Line, commit: Line) -> tuple[float, float]:
    """What a served step of so many rows has beside the step alone and the engine's time: sending
    its tokens, and the rest, which is in the step itself."""
    added_s = one.added_s - schedule(one.streams) - commit(one.streams)
    sent_s = min(max(0.0, added_s), one.publish_s)
    return sent_s, max(0.0, added_s - sent_s)


def _added_behind(one: StreamTime) -> tuple[float, float]:
    """As `_added`, where the host works while the device computes the next step: what is longer
    than the step alone is not the host's time, which the simulation hides by itself."""
    return one.publish_s, one.added_s


def _edge(serving: Serving, first_s: float) -> Edge:
    """`first_s` is what a step of one row adds by itself. Of the rest, what the HTTP process works
    is one request after the other; the remainder is a delay that many may have at once."""
    after_s = serving.round_trip_s / 2
    if not serving.first_tokens:
        return Edge(before_s=after_s, after_s=after_s)
    whole_s, whole_token_s = _straight(
        [(one.prompt_tokens, one.added_s) for one in serving.first_tokens]
    )
    busy_s, busy_token_s = _straight(
        [(one.prompt_tokens, one.busy_s) for one in serving.first_tokens]
    )
    # Of a request by itself the process also works on what wakes it up, and on the answer.
    busy_s = serving.burst_s or busy_s
    before_s = max(0.0, whole_s - first_s - after_s)
    busy_s, busy_token_s = min(busy_s, before_s), min(busy_token_s, whole_token_s)
    return Edge(
        before_s=before_s - busy_s,
        before_token_s=whole_token_s - busy_token_s,
        busy_s=busy_s,
        busy_token_s=busy_token_s,
        after_s=after_s,
    )


def _straight(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """A line through points by least squares: seconds at 0 tokens, and for each token. Neither is
    negative."""
    mean_tokens = fmean(tokens for tokens, _ in points)
    mean_s = fmean(seconds for _, seconds in points)
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
    token_s = 0.0
    if spread:
        slope = sum((tokens - mean_tokens) * (seconds - mean_s) for tokens, seconds in points)
        token_s = max(0.0, slope / spread)
    return max(0.0, median(seconds - token_s * tokens for tokens, seconds in points)), token_s
