"""What the router counts, and the text of its /metrics. Knows names; no sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from headrace.core.histogram import Histogram
from headrace.policies.breaker import Circuit
from headrace.router.fleet import Fleet
from headrace.router.replica import Replica

# Of the router's own part, which is far below a millisecond unless it must connect or retry.
ADDED_BOUNDS_S = (
    *(5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 30.0),
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "headrace_router"


class Counts:
    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()  # by replica ("" for our own) and status
        self.retries: Counter[str] = Counter()  # by reason
        self.cut = 0  # answers that ended before they were whole
        self.left = 0  # clients that left first
        self.shadowed: Counter[tuple[str, str]] = Counter()  # by version and outcome
        self.open_requests = 0
        self.added = Histogram(ADDED_BOUNDS_S)


def write_metrics(counts: Counts, fleet: Fleet, connections: int) -> str:
    return "\n".join([*_lines(counts, fleet, connections), ""])


def _lines(counts: Counts, fleet: Fleet, connections: int) -> Iterator[str]:
    yield from _family(
        "requests_total",
        "counter",
        "Answers, by the replica that gave them (empty: the router itself) and status.",
        [({"replica": r, "status": str(s)}, n) for (r, s), n in sorted(counts.answers.items())],
    )
    yield from _family(
        "retries_total",
        "counter",
        "Requests that were sent to another replica, by reason.",
        [({"reason": reason}, n) for reason, n in sorted(counts.retries.items())],
    )
    yield from _family(
        "answers_cut_total", "counter", "Answers whose replica failed half-way.", [({}, counts.cut)]
    )
    yield from _family(
        "clients_left_total", "counter", "Clients that left before the end.", [({}, counts.left)]
    )
    yield from _family(
        "shadow_requests_total",
        "counter",
        "Copies for shadows, by version and outcome.",
        [({"version": v, "outcome": o}, n) for (v, o), n in sorted(counts.shadowed.items())],
    )
    yield from _family("open_requests", "gauge", "Requests now.", [({}, counts.open_requests)])
    yield from _family("open_connections", "gauge", "Clients' connections.", [({}, connections)])
    yield from _replicas(fleet)
    yield from _histogram(
        "time_added_seconds",
        "From a request's last byte to when it was sent on; connecting and retries included.",
        counts.added,
    )


def _replicas(fleet: Fleet) -> Iterator[str]:
    rows = [
        ({"replica": r.url, "version": g.version.name}, r)
        for g in fleet.groups.values()
        for r in g.replicas.values()
    ]
    values: dict[str, tuple[str, str, Callable[[Replica], float]]] = {
        "replica_up": ("gauge", "1: takes requests.", lambda r: int(r.state == "up")),
        "replica_circuit_open": (
            "gauge",
            "1: gets no requests after failures.",
            lambda r: int(r.breaker.state is not Circuit.CLOSED),
        ),
        "replica_ejections_total": (
            "counter",
            "How often a heartbeat or failures took it out.",
            lambda r: r.ejections,
        ),
        "replica_failures_total": ("counter", "Failed requests.", lambda r: r.failures),
        "replica_running_requests": ("gauge", "Sent and not done.", lambda r: r.running),
        "replica_pending_tokens": (
            "gauge",
            "Tokens of those requests, as estimated from bytes and max_tokens.",
            lambda r: r.pending_tokens,
        ),
    }
    for name, (kind, words, value) in values.items():
        yield from _family(name, kind, words, [(labels, value(r)) for labels, r in rows])
    saturated = [(labels, _number(r.load.get("saturation"))) for labels, r in rows]
    yield from _family(
        "replica_saturation",
        "gauge",
        "As the replica's GET /load has it.",
        [(labels, value) for labels, value in saturated if value is not None],
    )


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _family(
    name: str, kind: str, words: str, samples: Iterable[tuple[dict[str, str], float]]
) -> Iterator[str]:
    samples = list(samples)
    if samples:
        yield f"# HELP {_PREFIX}_{name} {words}"
        yield f"# TYPE {_PREFIX}_{name} {kind}"
        for labels, value in samples:
            yield f"{_PREFIX}_{name}{_labels(labels)} {value!r}"


def _histogram(name: str, words: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {_PREFIX}_{name} {words}"
    yield f"# TYPE {_PREFIX}_{name} histogram"
    for edge, count in histogram.buckets():
        yield f'{_PREFIX}_{name}_bucket{{le="{edge}"}} {count:.0f}'
    yield f"{_PREFIX}_{name}_sum {histogram.sum!r}"
    yield f"{_PREFIX}_{name}_count {sum(histogram.counts):.0f}"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    shown = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(shown) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
