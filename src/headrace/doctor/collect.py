"""From a URL to an `Observation`: two readings, what the engine tells, the GPUs here, the probes.

All I/O of the doctor is called from here. What fails on the way is a note, and what was measured
until then is kept; only an endpoint that can't be reached at all is an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime

from headrace.core.errors import HeadraceError
from headrace.doctor import prometheus
from headrace.doctor.calibrated import steps_of_profile
from headrace.doctor.carry import carry_of
from headrace.doctor.endpoint import Endpoint, EndpointError, Reply
from headrace.doctor.engine_config import Told, ask_config
from headrace.doctor.exposition import read_page
from headrace.doctor.floor import floor_of, long_ratio, row_ratio
from headrace.doctor.local import gpus_now, links_here
from headrace.doctor.observation import CHAT, Earlier, Observation, Probe, tpot_of
from headrace.doctor.probe import Prober
from headrace.doctor.probe_plan import Plan, announcement, fitted
from headrace.doctor.rules.traffic import time_shares
from headrace.doctor.scrape import Change, Reading, change, gpus_of, read
from headrace.hardware.gpus import Gpu, find_gpu
from headrace.hardware.profile import Profile
from headrace.hardware.this_machine import gpus_here
from headrace.workload.slo import Slo

_SAMPLES = 5
_STEADY = 1.5
_CLOCKS_S = 5.0  # that two clocks may differ by; a reply tells its own in whole seconds

Metrics = Callable[[], Reading | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to do, from the command line."""

    interval_s: float = 5.0
    probes: bool = True
    plan: Plan = field(default_factory=Plan)
    objective: Slo = CHAT
    gpu: str | None = None
    profile: Profile | None = None
    model: str | None = None
    about: str | None = None
    direct: Endpoint | None = None
    earlier: Earlier | None = None
    seed: int | None = None


class Scraper:
    """/metrics of one endpoint. `why_not` has the reason where there is none."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.why_not: str | None = None
        self.ahead_s = 0.0  # the endpoint's clock, by its last reply

    def __call__(self) -> Reading | None:
        reply = self._endpoint.get("/metrics")
        self.ahead_s = ahead_s(reply, time.time())
        if reply.status == 401 or reply.status == 403:
            self.why_not = f"/metrics wants a key (HTTP {reply.status}): --key-variable"
            return None
        if reply.status != 200:
            self.why_not = f"/metrics answers HTTP {reply.status}"
            return None
        if reply.text.lstrip()[:1] == "<":
            self.why_not = "/metrics is a web page, not metrics"
            return None
        reading = read(read_page(reply.text), time.time())
        if reading.names is None:
            self.why_not = "/metrics has no names of an engine that is known here"
            return None
        return reading


def observe(
    endpoint: Endpoint, wanted: Wanted, *, say: Callable[[str], None] = lambda line: None
) -> Observation:
    scraper = Scraper(endpoint)
    first = scraper()  # raises where nothing answers
    told = ask_config(endpoint, first)
    readings = [first] if first is not None else []
    if first is not None:
        for _ in range(_SAMPLES - 1):
            time.sleep(wanted.interval_s / (_SAMPLES - 1))
            again = scraper()
            if again is not None:
                readings.append(again)
    seen = passive(endpoint.url, told, readings, wanted, ahead_s=scraper.ahead_s)
    seen = replace(seen, notes=(*seen.notes, *([scraper.why_not] if scraper.why_not else [])))
    return _completed(seen, endpoint, scraper if first else _no_metrics, wanted, say)


def ahead_s(reply: Reply, now_s: float) -> float:
    """How far the clock of who replied is ahead of ours; 0 where it does not tell."""
    try:
        told = parsedate_to_datetime(reply.headers.get("date", ""))
    except (TypeError, ValueError):
        return 0.0
    return told.timestamp() - now_s


def observe_prometheus(
    endpoint: Endpoint,
    server: Endpoint,
    wanted: Wanted,
    *,
    selector: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Observation:
    """Metrics from Prometheus; settings and probes still from the endpoint."""
    readings = prometheus.readings(server, interval_s=wanted.interval_s, selector=selector)
    seen = passive(endpoint.url, ask_config(endpoint, readings[-1]), readings, wanted)
    return _completed(seen, endpoint, _no_metrics, wanted, say)


def _completed(
    seen: Observation,
    endpoint: Endpoint,
    metrics: Metrics,
    wanted: Wanted,
    say: Callable[[str], None],
) -> Observation:
    """With the GPUs, the probes and the floor."""
    if endpoint.is_loopback:
        seen = replace(seen, gpus=gpus_now() or seen.gpus, links=links_here())
    plan = fitted(wanted.plan, seen.number("context_tokens"))
    if wanted.probes:
        say(announcement(plan, endpoint.url))
        seen = _with_probes(seen, endpoint, metrics, plan, wanted)
    gpu = _gpu(wanted, endpoint)
    lengths = (plan.medium_tokens, plan.long_tokens)
    floor = floor_of(wanted.model or seen.model, gpu, seen.config, lengths)
    if wanted.profile is not None:
        steps, why_not = steps_of_profile(wanted.profile, seen)
        seen = replace(seen, steps=steps, notes=(*seen.notes, *([why_not] if why_not else [])))
    carry_s = carry_of(seen, is_here=endpoint.is_loopback)
    seen = replace(seen, carry_s=carry_s, cores=os.cpu_count() if endpoint.is_loopback else None)
    shares = time_shares(seen)
    if wanted.about is not None and wanted.about not in shares:
        told = ", ".join(shares) or "nothing of the kind"
        note = f"this engine does not tell what {wanted.about} takes; it tells {told}"
        seen = replace(seen, notes=(*seen.notes, note))
    return replace(
        seen, floor=floor, row_ratio=row_ratio(wanted.model or seen.model),
        long_ratio=long_ratio(wanted.model or seen.model, lengths),
        earlier=wanted.earlier, about=wanted.about,
    )  # fmt: skip


def passive(
    url: str, told: Told, readings: list[Reading], wanted: Wanted, *, ahead_s: float = 0.0
) -> Observation:
    """From readings alone: nothing is asked any more. `ahead_s`: of the endpoint's clock."""
    if not readings:
        return Observation(
            url=url, engine=told.engine, model=told.model, config=told.config, notes=told.notes,
            objective=wanted.objective,
        )  # fmt: skip
    last = readings[-1]
    done = change(readings[0], last) if len(readings) > 1 else _nothing(last)
    levels: dict[str, tuple[float, ...]] = {
        name: tuple(each.levels[name] for each in readings if name in each.levels)
        for name in last.levels
    }
    config, notes = dict(told.config), list(told.notes)
    started = last.levels.get("started_at_s")
    uptime_s = last.at_s + ahead_s - started if started is not None else None
    if uptime_s is not None and uptime_s >= -_CLOCKS_S:
        config["uptime_s"] = max(0.0, uptime_s)
    elif uptime_s is not None:
        notes.append(f"it says that it was started {-uptime_s:,.0f} s from now: its clock is wrong")
    if abs(ahead_s) > _CLOCKS_S:
        word = "ahead of" if ahead_s > 0 else "behind"
        notes.append(f"its clock is {abs(ahead_s):,.0f} s {word} this one: only this one is used")
    if done.was_restarted:
        notes.append("counters fell between the readings: the engine was restarted")
    if last.unread_lines:
        notes.append(f"{last.unread_lines} lines of /metrics could not be read")
    return Observation(
        url=url,
        engine=told.engine,
        model=told.model,
        levels=levels,
        deltas=done.deltas,
        groups=done.groups,
        histograms=done.histograms,
        period_s=done.period_s,
        unknown=last.unknown,
        config=config,
        gpus=gpus_of(last),
        replicas=last.replicas,
        objective=wanted.objective,
        was_restarted=done.was_restarted,
        notes=tuple(notes),
    )


def _nothing(reading: Reading) -> Change:
    return Change(period_s=0.0, deltas={}, groups={}, histograms={}, was_restarted=False)


def _no_metrics() -> Reading | None:
    return None


def _with_probes(
    seen: Observation, endpoint: Endpoint, read_now: Metrics, plan: Plan, wanted: Wanted
) -> Observation:
    def quietly() -> Reading | None:
        try:
            return read_now()
        except EndpointError:
            return None

    def probe(at: Endpoint, reads: Metrics, is_local: bool) -> Probe:
        prober = Prober(
            at,
            plan,
            model=wanted.model or seen.model,
            engine=seen.engine.name,
            read=reads,
            is_local=is_local,
            seed=wanted.seed,
        )
        return prober.run()

    found = probe(endpoint, quietly, endpoint.is_loopback)
    direct = None
    if wanted.direct is not None:
        direct = probe(wanted.direct, _no_metrics, False)
    return replace(seen, probe=found, direct=direct, notes=(*seen.notes, *_notes(found)))


def _notes(probe: Probe) -> Iterator[str]:
    """What the reader of these times must know."""
    if probe.stopped is not None:
        yield (
            f"the endpoint went away after {probe.spent_s:.1f} s, while probing {probe.stopped}; "
            "what was measured until then is here"
        )
    good = [answer for answer in probe.answers if answer.is_good]
    if good and not any(answer.is_counted for answer in good):
        yield "the endpoint tells no usage: chunks are counted as tokens, prompts are not known"
    yield from _unsteady(probe)


def _unsteady(probe: Probe) -> tuple[str, ...]:
    """The same short request at the beginning and at the end."""
    first, last = tpot_of(probe.short), tpot_of(probe.plain)
    if not first or not last or max(first, last) < _STEADY * min(first, last):
        return ()
    return (
        f"one stream's time per token moved from {first * 1e3:.3g} to {last * 1e3:.3g} ms while "
        "probing: others use this server or its machine, and gains are rough",
    )


def _gpu(wanted: Wanted, endpoint: Endpoint) -> Gpu | None:
    if wanted.gpu is not None:
        return find_gpu(wanted.gpu)
    if not endpoint.is_loopback:
        return None
    try:
        return next((each.gpu for each in gpus_here() if each.gpu is not None), None)
    except HeadraceError:
        return None
