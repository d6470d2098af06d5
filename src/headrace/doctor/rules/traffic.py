"""What is asked for: long answers, a mode that does not fit, and tuning what does not matter."""

from __future__ import annotations

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule
from headrace.doctor.fixes import places
from headrace.doctor.gains import gain_of_places, next_power
from headrace.doctor.observation import Observation
from headrace.doctor.rules.words import load_of, ms, percent

_SMALL_SHARE = 0.05


def long_answers(seen: Observation) -> Finding | None:
    """Row 16."""
    lengths, e2e = seen.histograms.get("generation_length"), seen.mean("e2e")
    decode = seen.mean("decode_time")
    finished = seen.groups.get("finished", {})
    total = sum(finished.values())
    if lengths is None or lengths.mean is None or lengths.mean < 1024 or lengths.count < 5:
        return None
    share = decode / e2e if decode is not None and e2e else None
    at_limit = finished.get("length", 0.0) / total if total else 0.0
    if share is None or share < 0.8 or at_limit < 0.1:
        return None
    middle = lengths.quantile(0.5)
    return Finding(
        rule=16,
        kind=Kind.FAULT,
        symptom="long answers are most of the cost",
        evidence=(f"answers have {lengths.mean:,.0f} tokens on average; decode is {percent(share)} "
                  "of a request's time",
                  f"{percent(at_limit)} end because they reach their limit"),
        cause="no limit on output that fits what is needed",
        fix=("max_tokens in requests, stop sequences, a shorter format of answers",),
        gain=Gain(of="requests/s", low=1.0, high=max(1.0, lengths.mean / max(middle.middle, 1.0))
                  if middle else 1.0, basis="mean length over median length"),
        confidence=Confidence.MEDIUM,
        unless="all of the answer is read",
    )  # fmt: skip


def wrong_mode(seen: Observation) -> Finding | None:
    """Row 17: settings for few fast answers under batch work, or the reverse."""
    limit, load = seen.number("max_sequences"), load_of(seen)
    if limit is None:
        return None
    tpot, pace = seen.mean("tpot") or seen.mean("itl"), seen.objective.tpot_s
    if limit <= 32 and load.mean_waiting >= 4 * limit and load.is_free:
        wanted = next_power(min(load.mean_waiting, 16 * limit))
        return Finding(
            rule=17,
            kind=Kind.FAULT,
            symptom="settings of a chat, traffic of batch work",
            evidence=(f"{limit:g} places, {load.mean_waiting:.3g} requests waiting on average",),
            cause="few places keep single answers fast; here only throughput counts",
            fix=(places(seen, wanted), "or a second endpoint with settings for batch work"),
            gain=gain_of_places(seen, limit, wanted),
            confidence=Confidence.MEDIUM,
            unless="the queue is a moment's",
        )
    full = load.most_running >= 0.8 * limit
    slow = tpot is not None and pace is not None and tpot > 2 * pace
    if limit < 128 or not full or not slow or tpot is None or pace is None:
        return None
    if load.most_waiting >= 1:
        return None
    return Finding(
        rule=17,
        kind=Kind.FAULT,
        symptom="settings of batch work, an objective of a chat",
        evidence=(f"{load.most_running:g} of {limit:g} places run; TPOT {ms(tpot)} "
                  f"(objective {ms(pace)})",),
        cause="so many sequences share each step that every one of them is slow",
        fix=(places(seen, max(1, int(limit / 2))), "and a replica for the rest"),
        gain=Gain(of="speed of a stream", low=1.0, high=tpot / pace, basis="the objective"),
        confidence=Confidence.MEDIUM,
        unless="nobody reads along: --slo says so",
    )  # fmt: skip


def tuning_what_is_small(seen: Observation) -> Finding | None:
    """Row 28: --about PART, and the part's share of the time."""
    if seen.about is None:
        return None
    shares = time_shares(seen)
    share = shares.get(seen.about)
    if share is None or share >= _SMALL_SHARE:
        return None
    largest = max(shares, key=lambda part: shares[part])
    return Finding(
        rule=28,
        kind=Kind.FAULT,
        symptom=f"{seen.about} is not what takes the time",
        evidence=(f"{seen.about} is {percent(share)} of the time, {largest} "
                  f"{percent(shares[largest])}",),
        cause="tuning without a profile",
        fix=(f"look at {largest} first",),
        gain=Gain(of="speed", low=1.0, high=1 / (1 - share),
                  basis=f"if {seen.about} took no time at all"),
        confidence=Confidence.HIGH,
        unless="traffic is of another kind at other times",
    )  # fmt: skip


def time_shares(seen: Observation) -> dict[str, float]:
    """Parts of a step where the engine tells them, else of a request."""
    parts = dict(seen.groups.get("step_parts", {}))
    if sum(parts.values()) <= 0:
        names = {"queue": "queue_time", "prefill": "prefill_time", "decode": "decode_time"}
        parts = {part: mean for part, name in names.items() if (mean := seen.mean(name))}
    total = sum(parts.values())
    return {part: value / total for part, value in parts.items()} if total > 0 else {}


RULES: dict[int, Rule] = {16: long_answers, 17: wrong_mode, 28: tuning_what_is_small}
