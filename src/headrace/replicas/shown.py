"""What operators are shown of all replicas together: their states, their metrics, their load.

Knows slots and the fleet; no clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.core.errors import HeadraceError
from headrace.replicas.merged import merge_metrics
from headrace.replicas.roll import Progress
from headrace.replicas.slot import Slot
from headrace.router.fleet import Fleet
from headrace.router.heartbeat import Get
from headrace.router.replica import Replica

SCRAPE_S = 2.0


def show_all(
    slots: Sequence[Slot], seen: Sequence[dict[str, object]], progress: Progress | None
) -> dict[str, object]:
    """`seen` is what the router says of those in its fleet."""
    by_url = {str(each["url"]): each for each in seen}
    return {
        "replicas": [_show(slot, by_url.get(slot.address.url, {})) for slot in slots],
        "roll": None if progress is None else progress.facts(),
    }


def _show(slot: Slot, seen: dict[str, object]) -> dict[str, object]:
    return {
        "url": slot.address.url,
        "state": "out",
        **seen,
        "number": slot.number,
        "process": slot.state,
        "pid": slot.pid,
        "share": slot.share.shown,
        "restarts": slot.restarts,
        "why": slot.why or seen.get("why"),
    }


async def scrape_all(slots: Sequence[Slot], fleet: Fleet, get_of: Callable[[Replica], Get]) -> str:
    async def scrape(slot: Slot) -> str:
        replica = fleet.find(slot.address.url)
        if replica is None or not replica.is_up:
            return ""
        try:
            async with asyncio.timeout(SCRAPE_S):
                status, body = await get_of(replica)("/metrics")
        except (HeadraceError, TimeoutError, OSError):
            return ""
        return body.decode("utf-8", "replace") if status == 200 else ""

    texts = await asyncio.gather(*map(scrape, slots))
    return merge_metrics({str(s.number): t for s, t in zip(slots, texts, strict=True) if t})


def sum_load(fleet: Fleet) -> dict[str, float]:
    """Counts are summed up; levels are those of the fullest replica."""
    found: dict[str, float] = {}
    for replica in fleet.replicas:
        for name, value in replica.load.items() if replica.is_up else ():
            if isinstance(value, int | float) and not isinstance(value, bool):
                before = found.get(name, 0)
                is_level = isinstance(value, float)
                found[name] = max(before, value) if is_level else before + value
    return found
