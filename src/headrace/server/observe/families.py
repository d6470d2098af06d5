"""Metric families: a name, what it means, and samples, each labelled with the model.

Metrics that vLLM has too are given under both names. Knows how names are built; exposition.py knows
which metrics there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from headrace.core.histogram import Histogram

OWN, VLLM = "headrace:", "vllm:"

Labels = Mapping[str, str]
Samples = Iterable[tuple[Labels, float]]


class FamilyMaker:
    def __init__(self, model_name: str) -> None:
        self._model = {"model_name": model_name}

    def gauge(
        self, name: str, words: str, value: float | Samples, old_name: str = ""
    ) -> Iterator[Metric]:
        for full in _names(name, old_name):
            yield self._family("gauge", full, words, value)

    def counter(self, name: str, words: str, value: float | Samples) -> Iterator[Metric]:
        for full in _names(name):
            yield self._family("counter", full, words, value)

    def histogram(
        self, name: str, words: str, histogram: Histogram, old_name: str = ""
    ) -> Iterator[Metric]:
        buckets = [({**self._model, "le": le}, n) for le, n in histogram.buckets()]
        for full in _names(name, old_name):
            family = Metric(full, words, "histogram")
            for labels, n in buckets:
                family.add_sample(f"{full}_bucket", labels, n)
            family.add_sample(f"{full}_count", self._model, buckets[-1][1])
            family.add_sample(f"{full}_sum", self._model, histogram.sum)
            yield family

    def own_gauge(self, name: str, words: str, value: float | Samples) -> Metric:
        return self._family("gauge", OWN + name, words, value)

    def own_counter(self, name: str, words: str, value: float | Samples) -> Metric:
        return self._family("counter", OWN + name, words, value)

    def _family(self, kind: str, name: str, words: str, value: float | Samples) -> Metric:
        family = Metric(name, words, kind)
        suffix = "_total" if kind == "counter" else ""
        samples = [({}, value)] if isinstance(value, (int, float)) else value
        for labels, number in samples:
            family.add_sample(name + suffix, {**self._model, **labels}, float(number))
        return family


def _names(name: str, old_name: str = "") -> list[str]:
    return [OWN + name, VLLM + name, *([VLLM + old_name] if old_name else [])]
