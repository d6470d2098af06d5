"""Prometheus' plain text and OpenMetrics' text, chosen by the Accept header.

Not prometheus_client's writers, for two reasons. From 0.23 on they turn `headrace:steps_total` into
`headrace_steps_total` for OpenMetrics, though a colon is legal in every format and our names never
need escaping. And a router that balances by queue length reads /metrics twenty times per second, in
the same event loop that sends tokens: the text before a value is made once and kept, which takes
less than half of the time. Knows the formats; no names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

MOST_KEPT = 10_000  # cached line heads; label values are bounded, so this only limits a bug

# The supported versions by media type; the first is the default.
_OPEN, _PLAIN = "application/openmetrics-text", "text/plain"
_VERSIONS = {_OPEN: ("1.0.0", "0.0.1"), _PLAIN: ("0.0.4", "1.0.0")}
# Escaping schemes (Prometheus 3) that leave legal names alone. A fourth, "dots", doubles every
# underscore: clients that ask for it get "underscores", and the content type says so.
_ESCAPING = ("allow-utf-8", "underscores", "values")


@dataclass(frozen=True, slots=True)
class TextFormat:
    is_open: bool  # OpenMetrics
    content_type: str


PLAIN = TextFormat(False, f"{_PLAIN}; version=0.0.4; charset=utf-8")


def choose_format(accept: str) -> TextFormat:
    """The supported format that the header prefers; the plain one if it names none of them, as with
    browsers and curl."""
    best, best_weight = PLAIN, 0.0
    for each in accept.split(","):
        media, *rest = (part.strip() for part in each.split(";"))
        asked = {name.strip().lower(): value.strip(' "') for name, value in map(_halves, rest)}
        versions, weight = _VERSIONS.get(media.lower(), ()), _weight(asked.get("q", "1"))
        if not versions or asked.get("version", versions[0]) not in versions:
            continue
        if weight > best_weight:  # on a tie, the first
            best = _format(media.lower(), asked.get("version", versions[0]), asked.get("escaping"))
            best_weight = weight
    return best


def _halves(parameter: str) -> tuple[str, str]:
    name, _, value = parameter.partition("=")
    return name, value


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0  # also rejects nan


def _format(media: str, version: str, escaping: str | None) -> TextFormat:
    content_type = f"{media}; version={version}; charset=utf-8"
    if version == "1.0.0" and escaping is not None:
        content_type += f"; escaping={escaping if escaping in _ESCAPING else 'underscores'}"
    return TextFormat(media == _OPEN, content_type)


class TextWriter:
    """Writes samples with a name, labels and a value: no timestamps and no exemplars."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}

    def write(self, families: Iterable[Metric], *, is_open: bool = False) -> bytes:
        lines: list[str] = []
        heads = self._heads
        for family in families:
            lines.append(_family_head(family, is_open))
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                head = heads.get(key)
                if head is None:
                    if len(heads) >= MOST_KEPT:
                        heads.clear()
                    head = heads[key] = sample.name + _labels(sample.labels)
                lines.append(f"{head} {floatToGoString(sample.value)}\n")  # type: ignore[no-untyped-call]
        if is_open:
            lines.append("# EOF\n")
        return "".join(lines).encode()


def _family_head(family: Metric, is_open: bool) -> str:
    if is_open:  # OpenMetrics names a counter family without its suffix
        name, words = family.name, _escape(family.documentation)
    else:
        name = family.name + ("_total" if family.type == "counter" else "")
        words = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {words}\n# TYPE {name} {family.type}\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    shown = ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))
    return f"{{{shown}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
