"""Metrics per key: requests waiting and running, tokens used, and its share of the engine.

A watcher like metrics.py: events come in as they happen, a scrape reads the sums. There is one
label value per configured key. They are shown on /metrics, which is for operators: a key must not
learn about other keys. Knows the names of keys; not the keys themselves, and no HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.server.link.snapshot import TenantSnapshot
from headrace.server.observe.families import FamilyMaker
from headrace.server.observe.metrics import Metrics, is_refusal
from headrace.server.observe.record import HttpRecord, RequestRecord

_NOTHING = TenantSnapshot()


class KeyMetrics(Collector):
    def __init__(self, metrics: Metrics, model_name: str, weights: Mapping[str, int]) -> None:
        self._metrics = metrics
        self._make = FamilyMaker(model_name)
        self._weights = dict(weights)  # by name
        self._waiting: dict[int, str] = {}  # id() of records, which live until their end
        self._running: dict[int, str] = {}
        self._prompt_tokens = self._counter()
        self._generated_tokens = self._counter()
        self._refused = self._counter()

    def _counter(self) -> Counter[str]:
        return Counter(dict.fromkeys(self._weights, 0))

    # -- what is told ----------------------------------------------------------------------------

    def on_arrival(self, record: RequestRecord) -> None:
        if record.key_name in self._weights:
            self._waiting[id(record)] = record.key_name

    def on_start(self, record: RequestRecord) -> None:
        name = self._waiting.pop(id(record), None)
        if name is not None:
            self._running[id(record)] = name
            self._prompt_tokens[name] += record.prompt_tokens

    def on_tokens(self, record: RequestRecord, count: int, gap_s: float | None) -> None:
        if record.key_name in self._weights:
            self.on_start(record)  # a first token implies it
            self._generated_tokens[record.key_name] += count

    def on_end(self, record: RequestRecord) -> None:
        self._waiting.pop(id(record), None)
        self._running.pop(id(record), None)

    def on_http(self, record: HttpRecord) -> None:
        refused = record.status >= 400 and record.error is not None and is_refusal(record.error)
        if refused and record.key_name in self._weights:
            self._refused[record.key_name] += 1

    # -- what is asked ---------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is collected just to be registered

    def collect(self) -> Iterator[Metric]:
        if not self._weights:
            return
        make, names, now = self._make, list(self._weights), self._metrics.snapshot
        tenants = {} if now is None else now.tenants
        totals = self._metrics.engine
        waiting, running = Counter(self._waiting.values()), Counter(self._running.values())
        yield make.own_gauge(
            "key_weight",
            "A key's weight: its share of the engine relative to other keys.",
            [({"key": name}, weight) for name, weight in self._weights.items()],
        )
        yield make.own_gauge(
            "key_requests",
            "Requests of a key by state: waiting or running.",
            [
                ({"key": name, "state": state}, counts[name])
                for state, counts in (("running", running), ("waiting", waiting))
                for name in names
            ],
        )
        yield make.own_gauge(
            "key_sequences",
            "The engine's sequences of a key, by state.",
            [
                ({"key": name, "state": state}, getattr(tenants.get(name, _NOTHING), state))
                for state in ("running", "waiting")
                for name in names
            ],
        )
        yield make.own_counter(
            "key_tokens",
            "Tokens of a key: prompt tokens of started requests, and generated tokens.",
            [
                ({"key": name, "kind": kind}, counts[name])
                for kind, counts in (
                    ("prompt", self._prompt_tokens),
                    ("generated", self._generated_tokens),
                )
                for name in names
            ],
        )
        yield make.own_counter(
            "key_computed_tokens",
            "Tokens computed for a key, without cached ones; the engine is shared by these.",
            [({"key": name}, totals.total(f"key_tokens {name}")) for name in names],
        )
        yield make.own_counter(
            "key_gave_way",
            "Sequences of a key preempted in favour of another key's, for a fair share.",
            [({"key": name}, totals.total(f"key_gave_way {name}")) for name in names],
        )
        yield make.own_counter(
            "key_rejected_requests",
            "Requests of a key that were refused.",
            [({"key": name}, self._refused[name]) for name in names],
        )
