"""Did the fix help? The same probes before and after, compared by intervals of ratios.

Each quantity has several single values on both sides. Their logarithms are compared by Welch's t:
the interval holds the ratio of the geometric means with 95%. Whole above 1: better; whole below:
worse; else it is not known, and more repeats may tell. Two medians alone are never a verdict. What
the fix was for is looked at by itself; all other quantities share their 5% (Bonferroni), since one
of seven would differ by chance in every third comparison.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.ratio import RISK, Verdict, ratio_of_means, verdict_of

# A burst as a multiple of one stream just before it: what is left of it when the machine's own
# speed moves. For fixes that let more run together and leave one stream as it is.
_STREAMS = "burst over one stream"
# A prefix for the first time over the same again, pair by pair: the machine's speed falls out.
_AGAIN = "a prefix again, over new"
_TOGETHER = frozenset({2, 3, 4, 15, 17, 20, 32})
_NEAR = 1.3  # a prediction that is kept: within 30% of its band


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How many times as good `after` is as `before`: for times, before over after."""

    name: str
    before: float  # geometric means
    after: float
    unit: str
    low: float
    high: float
    count: tuple[int, int]
    is_meant: bool = False  # a finding of before predicted a gain of it

    @property
    def ratio(self) -> float:
        return math.sqrt(self.low * self.high)

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the earlier report promised for a finding, beside what came."""

    rule: int
    symptom: str
    of: str
    low: float
    high: float
    is_gone: bool  # the finding is not there any more
    measured: Compared | None  # None: nothing that was probed shows it
    within: bool | None  # better, and within 30% of the predicted band; None: not known


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[Compared, ...]:
    """Two reports' probes."""
    first, second = before.get("probe"), after.get("probe")
    if not first or not second:
        raise ConfigError(
            "The report of before has no probes: there is nothing to compare with.",
            "Run `headrace doctor URL --save FILE` without --no-probe before the change.",
        )
    rows = []
    meant = _meant(before)
    others = sum(1 for name, _, _ in _QUANTITIES if name not in meant)
    for name, unit, is_time in _QUANTITIES:
        before_values, after_values = (_values(probe, name) for probe in (first, second))
        sides = (before_values, after_values)
        found = ratio_of_means(*sides, risk=RISK if name in meant else RISK / others)
        if found is None:
            continue
        low, high = found
        if is_time:
            low, high = 1 / high, 1 / low
        means = [math.exp(statistics.fmean(math.log(v) for v in side)) for side in sides]
        rows.append(
            Compared(name=name, before=means[0], after=means[1], unit=unit, low=low, high=high,
                     count=(len(sides[0]), len(sides[1])), is_meant=name in meant)
        )  # fmt: skip
    return tuple(rows)


# Name, unit, whether less is better.
_QUANTITIES = (
    ("TTFT of a short prompt", "s", True),
    ("time per token, one stream", "s", True),
    ("burst tokens/s", "tokens/s", False),
    (_STREAMS, "streams", False),
    ("TTFT in a burst", "s", True),
    ("TTFT of a repeated prefix", "s", True),
    (_AGAIN, "times", False),
    ("time per token with a grammar", "s", True),
    ("TTFT with a new schema", "s", True),
    ("time per token with penalties", "s", True),
)
# What a gain is about -> the quantity that shows it.
_SHOWN_BY = {
    "output tokens/s": "burst tokens/s",
    "tokens/s of one stream": "time per token, one stream",
    "speed of a stream": "time per token, one stream",
    "TTFT of a repeated prefix, as speed,": _AGAIN,
    "TTFT, as speed,": "TTFT of a short prompt",
    "speed of answers with a JSON schema": "time per token with a grammar",
    "TTFT with a new schema, as speed,": "TTFT with a new schema",
    "speed of answers with penalties": "time per token with penalties",
}


def _values(probe: dict[str, Any], name: str) -> list[float]:
    def field(group: str, key: str) -> list[float]:
        return [a[key] for a in probe.get(group, ()) if not a.get("error") and a.get(key)]

    found: dict[str, Callable[[], list[Any]]] = {
        "TTFT of a short prompt": lambda: field("short", "ttft_s"),
        "time per token, one stream": lambda: field("short", "tpot_s"),
        "burst tokens/s": lambda: [rate for rate in probe.get("burst_rates", ()) if rate],
        _STREAMS: lambda: [
            rate * one["tpot_s"]
            for rate, one in zip(
                probe.get("burst_rates", ()), probe.get("references", ()), strict=False
            )
            if rate and one.get("tpot_s") and not one.get("error")
        ],
        "TTFT in a burst": lambda: [
            statistics.fmean(ttfts)
            for burst in probe.get("bursts", ())
            if (ttfts := [a["ttft_s"] for a in burst if not a.get("error") and a.get("ttft_s")])
        ],
        "TTFT of a repeated prefix": lambda: field("warm", "ttft_s"),
        _AGAIN: lambda: [
            cold["ttft_s"] / warm["ttft_s"]
            for cold, warm in zip(probe.get("cold", ()), probe.get("warm", ()), strict=False)
            if cold.get("ttft_s")
            and warm.get("ttft_s")
            and not cold.get("error")
            and not warm.get("error")
        ],
        "time per token with a grammar": lambda: [
            *field("grammar", "tpot_s"),
            *field("grammar_new", "tpot_s"),
        ],
        "TTFT with a new schema": lambda: field("grammar_new", "ttft_s"),
        "time per token with penalties": lambda: field("penalty", "tpot_s"),
    }
    return [float(value) for value in found[name]()]


def promises(
    before: dict[str, Any], after: dict[str, Any], compared: tuple[Compared, ...]
) -> tuple[Kept, ...]:
    """What was predicted, beside what was measured."""
    rows = {each.name: each for each in compared}
    still = {finding["rule"] for finding in after.get("findings", ())}
    kept = []
    for finding in before.get("findings", ()):
        gain = finding.get("gain") or {}
        low, high, of = gain.get("low"), gain.get("high"), gain.get("of", "")
        if low is None or high is None:
            continue
        row = rows.get(_shown_by(finding))
        within = None
        if row is not None and row.verdict is not Verdict.INCONCLUSIVE:
            near = low / _NEAR <= row.ratio <= high * _NEAR
            within = near and row.verdict is Verdict.BETTER
        kept.append(
            Kept(rule=finding["rule"], symptom=finding["symptom"], of=of, low=low, high=high,
                 is_gone=finding["rule"] not in still, measured=row, within=within)
        )  # fmt: skip
    return tuple(kept)


def _meant(report: dict[str, Any]) -> set[str]:
    """The quantities that the report's findings are about."""
    return {_shown_by(finding) for finding in report.get("findings", ())} - {""}


def _shown_by(finding: dict[str, Any]) -> str:
    of = (finding.get("gain") or {}).get("of", "")
    if of == "output tokens/s" and finding.get("rule") in _TOGETHER:
        return _STREAMS
    return _SHOWN_BY.get(of, "")


def helped(compared: tuple[Compared, ...]) -> Verdict:
    """By what the fix was for; where nothing was predicted, by everything: better where something
    is, and nothing is worse."""
    meant = [each for each in compared if each.is_meant]
    verdicts = {each.verdict for each in meant or compared}
    if Verdict.WORSE in verdicts:
        return Verdict.INCONCLUSIVE if Verdict.BETTER in verdicts else Verdict.WORSE
    return Verdict.BETTER if Verdict.BETTER in verdicts else Verdict.INCONCLUSIVE
