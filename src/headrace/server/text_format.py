"""Prometheus' plain text format, written in under half the time that prometheus_client takes.

A router that balances by queue length reads /metrics twenty times a second, in the same event loop
that sends tokens. What stands before a value is made once and kept. Knows the format; no names.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

MOST_KEPT = 10_000  # heads of lines; label values are bounded, this bounds a mistake


class TextWriter:
    def __init__(self) -> None:
        self._heads: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}

    def write(self, families: Iterable[Metric]) -> bytes:
        lines: list[str] = []
        heads = self._heads
        for family in families:
            name = family.name + ("_total" if family.type == "counter" else "")
            words = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
            lines.append(f"# HELP {name} {words}\n# TYPE {name} {family.type}\n")
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                head = heads.get(key)
                if head is None:
                    if len(heads) >= MOST_KEPT:
                        heads.clear()
                    head = heads[key] = sample.name + _labels(sample.labels)
                lines.append(f"{head} {floatToGoString(sample.value)}\n")  # type: ignore[no-untyped-call]
        return "".join(lines).encode()


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    shown = ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))
    return f"{{{shown}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
