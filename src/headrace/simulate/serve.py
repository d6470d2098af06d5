"""A workload on one replica, from the first request to the last token."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.core.errors import HeadraceError
from headrace.simulate.feed import Feed
from headrace.simulate.replica import Replica, Setup
from headrace.simulate.report import Report
from headrace.simulate.served import Served
from headrace.simulate.undisturbed import undisturbed
from headrace.workload.ask import Ask


def serve(asks: Iterable[Ask], setup: Setup) -> Report:
    """`asks` in order of time, as `Workload.asks` gives them. Deterministic: the same asks and the
    same setup give the same report."""
    feed, replica = Feed(asks), Replica(setup)
    served: list[Served] = []
    with undisturbed():
        while True:
            arrival_s, next_s = feed.next_s, replica.next_s
            if arrival_s is not None and arrival_s <= next_s:
                arrival_s, ask = feed.pop()
                served.append(Served(ask=ask, arrival_s=arrival_s))
                replica.offer(served[-1], arrival_s)
            elif next_s < math.inf:
                for each in replica.wake():
                    feed.ended(each.ask, each.end_s or 0.0)
            else:
                break
    check_all_ended(served, feed)
    stats = replica.stats
    return Report(
        served=tuple(served),
        steps=stats.steps,
        preemptions=stats.preemptions,
        draft_tokens=stats.drafts.draft_tokens,
        accepted_tokens=stats.drafts.accepted_tokens,
        busy_s=stats.compute_s,
    )


def check_all_ended(served: list[Served], feed: Feed) -> None:
    """Every request is accounted for."""
    lost = sum(1 for each in served if each.end_s is None)
    if lost or feed.held:
        raise HeadraceError(
            f"{lost} requests never ended, and {feed.held} waited for a turn that never came; "
            "expected none.",
            "Check that every turn of a session but its first follows one in the workload.",
        )
