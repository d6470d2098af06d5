"""A page of metrics as standard values, and two of them as what happened in between.

Knows names.py's tables. Counters that fell mean a restart: then what the second page has is what
came since, and that is said. A value that is not there is not zero: `unknown` has the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.doctor.buckets import Buckets, added, of_cumulative
from headrace.doctor.exposition import Page, Sample
from headrace.doctor.names import ENGINES, EVERY, FULLEST, EngineNames, Source
from headrace.doctor.observation import GpuNow, Replica

_REPLICA_LABELS = ("instance", "pod", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One page, in standard names."""

    at_s: float
    names: EngineNames | None
    levels: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # labels of *_info
    replicas: tuple[Replica, ...] = ()
    has_adapters: bool = False
    unread_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happened between two readings."""

    period_s: float
    deltas: Mapping[str, float]
    groups: Mapping[str, Mapping[str, float]]
    histograms: Mapping[str, Buckets]
    was_restarted: bool


def engine_of(page: Page) -> EngineNames | None:
    return next((names for names in ENGINES if page.starts_with(names.prefix)), None)


def read(page: Page, at_s: float) -> Reading:
    names = engine_of(page)
    if names is None:
        return Reading(at_s=at_s, names=None, unread_lines=page.unread_lines)
    levels = _values(page, names.levels)
    counters = _values(page, names.counters)
    groups = {
        name: found
        for name, (source, label) in names.groups.items()
        if (found := _grouped(page, source, label))
    }
    if "finished" in groups and "finished" not in counters:
        counters["finished"] = sum(groups["finished"].values())
    histograms = {
        name: buckets
        for name, sources in names.histograms.items()
        if (buckets := _histogram(page, sources)) is not None
    }
    for name, (total, count) in names.means.items():
        mean = _mean(page, total, count)
        if mean is not None:
            histograms[name] = mean
    known = {*levels, *counters, *groups, *histograms}
    return Reading(
        at_s=at_s,
        names=names,
        levels=levels,
        counters=counters,
        groups=groups,
        histograms=histograms,
        unknown={name: _why(names, name) for name in EVERY if name not in known},
        info=_info(page),
        replicas=_replicas(page, names),
        has_adapters=bool(page.samples(f"{names.prefix}lora_requests_info")),
        unread_lines=page.unread_lines,
    )


def change(before: Reading, after: Reading) -> Change:
    deltas, fell = {}, False
    for name, value in after.counters.items():
        first = before.counters.get(name)
        if first is None or value < first:
            fell = fell or first is not None
            first = 0.0
        deltas[name] = value - first
    groups: dict[str, dict[str, float]] = {}
    for name, parts in after.groups.items():
        firsts = before.groups.get(name, {})
        has_fallen = any(value < firsts.get(label, 0.0) for label, value in parts.items())
        fell = fell or has_fallen
        groups[name] = {
            label: value - (0.0 if has_fallen else firsts.get(label, 0.0))
            for label, value in parts.items()
        }
    return Change(
        period_s=after.at_s - before.at_s,
        deltas=deltas,
        groups=groups,
        histograms={
            name: added(before.histograms.get(name), value)
            for name, value in after.histograms.items()
        },
        was_restarted=fell,
    )


def gpus_of(reading: Reading) -> tuple[GpuNow, ...]:
    """Triton's page has the GPU's own numbers."""
    busy = reading.levels.get("gpu_busy")
    used = reading.levels.get("gpu_used_bytes")
    if busy is None and used is None:
        return ()
    memory = reading.levels.get("gpu_memory_bytes")
    return (GpuNow(name="GPU", used_bytes=used, memory_bytes=memory, busy_share=busy),)


def _why(names: EngineNames, name: str) -> str:
    if name in names.absent:
        return names.absent[name]
    for table in (names.levels, names.counters, names.histograms):
        if name in table:
            return f"{table[name][0].name} is not on this page: another version, or not used yet"
    if name in names.groups:
        return f"{names.groups[name][0].name} is not on this page"
    return f"{names.label} does not export it"


def _matching(page: Page, source: Source) -> list[Sample]:
    return [
        sample
        for sample in page.samples(source.name)
        if all(sample.labels.get(key) == value for key, value in source.labels)
    ]


def _first(page: Page, sources: tuple[Source, ...]) -> tuple[Source, list[Sample]] | None:
    for source in sources:
        found = _matching(page, source)
        if found:
            return source, found
    return None


def _values(page: Page, table: Mapping[str, tuple[Source, ...]]) -> dict[str, float]:
    values = {}
    for name, sources in table.items():
        found = _first(page, sources)
        if found is not None:
            source, samples = found
            join = max if name in FULLEST else sum
            values[name] = join(sample.value for sample in samples) * source.scale
    return values


def _grouped(page: Page, source: Source, label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in _matching(page, source):
        part = sample.labels.get(label, "")
        found[part] = found.get(part, 0.0) + sample.value * source.scale
    return found


def _histogram(page: Page, sources: tuple[Source, ...]) -> Buckets | None:
    for source in sources:
        cumulative: dict[float, float] = {}
        for sample in page.samples(f"{source.name}_bucket"):
            try:
                bound = float(sample.labels.get("le", "")) * source.scale
            except ValueError:
                continue
            cumulative[bound] = cumulative.get(bound, 0.0) + sample.value
        if cumulative:
            total = sum(each.value for each in page.samples(f"{source.name}_sum"))
            return of_cumulative(cumulative, total * source.scale)
        sums = page.samples(f"{source.name}_sum")
        counts = page.samples(f"{source.name}_count")
        if sums and counts:  # a summary: a mean without buckets
            total = sum(each.value for each in sums) * source.scale
            return _only_mean(total, sum(each.value for each in counts))
    return None


def _mean(page: Page, total: Source, count: Source) -> Buckets | None:
    sums, counts = _matching(page, total), _matching(page, count)
    if not sums or not counts:
        return None
    return _only_mean(
        sum(each.value for each in sums) * total.scale, sum(each.value for each in counts)
    )


def _only_mean(total: float, count: float) -> Buckets:
    return Buckets(bounds=(float("inf"),), counts=(count,), total=total)


def _info(page: Page) -> dict[str, Mapping[str, str]]:
    return {
        name: samples[0].labels
        for name, samples in page.by_name.items()
        if name.endswith(("_info", ":backend_config"))
    }


def _replicas(page: Page, names: EngineNames) -> tuple[Replica, ...]:
    """Several engines behind one page, or one query: by the label that tells them apart."""
    running = _first(page, names.levels.get("running", ()))
    waiting = _first(page, names.levels.get("waiting", ()))
    if running is None or waiting is None:
        return ()
    label = next(
        (key for key in _REPLICA_LABELS if len({s.labels.get(key) for s in running[1]}) > 1), None
    )
    if label is None:
        return ()
    counts: dict[str, list[float]] = {}
    for place, samples in enumerate((running[1], waiting[1])):
        for sample in samples:
            counts.setdefault(sample.labels.get(label, ""), [0.0, 0.0])[place] += sample.value
    return tuple(Replica(name=n, running=r, waiting=w) for n, (r, w) in sorted(counts.items()))
