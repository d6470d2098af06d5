"""Prometheus' text format, and OpenMetrics' as far as it is the same: lines into samples.

Knows no engine's names. A line that can't be read is left out and counted, never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LINE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)\s*(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+[-\d.eE+]+)?"
    r"(?:\s+#.*)?"
)
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPED = re.compile(r'\\[\\"n]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All samples of a page by name, and how many lines could not be read."""

    by_name: Mapping[str, tuple[Sample, ...]]
    unread_lines: int = 0

    def samples(self, name: str) -> tuple[Sample, ...]:
        return self.by_name.get(name, ())

    def starts_with(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.by_name)


def read_page(text: str) -> Page:
    found: dict[str, list[Sample]] = {}
    unread = 0
    for line in text.split("\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        sample = _sample(line)
        if sample is None:
            unread += 1
        else:
            found.setdefault(sample.name, []).append(sample)
    return Page(by_name={name: tuple(each) for name, each in found.items()}, unread_lines=unread)


def page_of(samples: Iterator[Sample]) -> Page:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append(sample)
    return Page(by_name={name: tuple(each) for name, each in found.items()})


def _sample(line: str) -> Sample | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    labels = _labels(match["labels"] or "")
    try:
        value = float(match["value"])  # also NaN, +Inf and -Inf
    except ValueError:
        return None
    if labels is None or math.isnan(value):
        return None
    return Sample(name=match["name"], labels=labels, value=value)


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    at = 0
    text = text.strip()
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        labels[match[1]] = _ESCAPED.sub(lambda found: _ESCAPES[found[0]], match[2])
        at = match.end()
    return labels
