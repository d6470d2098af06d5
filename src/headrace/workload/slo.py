"""A service level objective: which share of requests must be how fast.

As people write it: "ttft=500ms,tpot=50ms", "ttft=2s,e2e=30s,share=95%". A time needs its unit,
because 500 may be meant as milliseconds or as seconds. TTFT counts from the scheduled arrival; TPOT
is (last token - first token) / (output tokens - 1), without the first token. Knows no measurements.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from headrace.core.checks import refusal
from headrace.core.errors import ConfigError

_UNITS_S = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-zµ]*)")
_TIMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """None: not part of the objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    share: float = 0.99  # of all requests; one that failed has missed

    def __post_init__(self) -> None:
        for name in _TIMES:
            value = getattr(self, f"{name}_s")
            if value is not None and not 0 < value < math.inf:
                raise refusal(ConfigError, name, value, "a time above 0")
        if not 0 < self.share <= 1:
            raise refusal(ConfigError, "share", self.share, "above 0 and at most 1")

    def is_met_by(self, *, ttft_s: float, tpot_s: float, e2e_s: float) -> bool:
        """Whether one request is within it."""
        return (
            (self.ttft_s is None or ttft_s <= self.ttft_s)
            and (self.tpot_s is None or tpot_s <= self.tpot_s)
            and (self.e2e_s is None or e2e_s <= self.e2e_s)
        )

    def __str__(self) -> str:
        """As `parse_slo` reads it."""
        parts = [
            f"{name}={_shown(value)}"
            for name in _TIMES
            if (value := getattr(self, f"{name}_s")) is not None
        ]
        return ",".join([*parts, f"share={self.share * 100:.10g}%"])


def parse_slo(text: str, param: str = "slo") -> Slo:
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.lower()
        if not equals or name not in (*_TIMES, "share"):
            raise refusal(
                ConfigError, param, text, "such as ttft=500ms,tpot=50ms,e2e=20s,share=99%"
            )
        key = name if name == "share" else f"{name}_s"
        if key in found:
            raise ConfigError(f"{param} has {name} twice.", "Give each once.", param=param)
        found[key] = (
            parse_share(f"{param}'s share", value)
            if name == "share"
            else parse_time(f"{param}'s {name}", value)
        )
    if not found.keys() - {"share"}:
        raise refusal(ConfigError, param, text, "at least one of ttft, tpot and e2e")
    return Slo(**found)


def parse_time(param: str, value: str) -> float:
    """In seconds, of a number with its unit."""
    match = _TIME.fullmatch(value.strip())
    if match is None or (match[2] and match[2].lower() not in _UNITS_S):
        raise refusal(ConfigError, param, value, "a time such as 500ms or 2s")
    if not match[2]:
        raise ConfigError(
            f"{param} is {value} without a unit; expected a time such as {value}ms or {value}s.",
            f"Write {value}ms if you mean milliseconds.",
            param=param,
        )
    return float(match[1]) * _UNITS_S[match[2].lower()]


def parse_share(param: str, value: str) -> float:
    number, is_percent = value.removesuffix("%"), value.endswith("%")
    try:
        share = float(number) / (100 if is_percent else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise refusal(ConfigError, param, value, "such as 99% or 0.99")
    return share


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.10g}ms" if seconds < 1 else f"{seconds:.10g}s"
