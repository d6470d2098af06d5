"""A step by operation, as values: times, what was achieved, how near that is to the peaks; a trace.

operations.py fills them in on a CPU, gpu_operations.py on a GPU. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.calibrate.steps import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the device can do at most, a second. A multiply-add is two operations."""

    flops_s: Mapping[str, float]  # by type: "int8", "fp32", "bf16" ...
    bytes_s: float
    source: str

    def bound_s(self, flops: float, bytes_: float, rate: str) -> float | None:
        """The least time, where computing and reading overlap. A type without a rate of its own is
        held against bf16's; None: neither is known."""
        most = self.flops_s.get(rate, self.flops_s.get("bf16"))
        return None if most is None else max(flops / most, bytes_ / self.bytes_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """All launches of one kernel by one operation."""

    name: str
    group: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    name: str
    calls: int
    seconds: float  # in the best round
    median_s: float
    busy_share: float | None = None  # of the threads' time; None: not known
    flops: float | None = None
    bytes: float | None = None
    bound_s: float | None = None  # at the peaks; None: not known
    group: str | None = None  # on a GPU: products, attention, norms, draws ...
    kernels: tuple[Kernel, ...] = ()  # on a GPU, in the best round; the longest first

    @property
    def of_peak(self) -> float | None:
        return None if not self.bound_s or self.seconds <= 0 else self.bound_s / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A bar of a trace; seconds since its step began."""

    name: str
    began_s: float
    seconds: float
    lane: str = "operations"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """A step of as many sequences when the engine makes one after the other."""

    step_s: float  # median
    host_s: float  # of it, while nothing computed on a CPU, or the host did not wait for a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    point: Point
    best_s: float
    median_s: float
    operations: tuple[Operation, ...]  # the longest first
    outside_s: float  # of the median step: what no operation accounts for
    mode: str | None = None  # on a GPU: "graphs" or "launches"
    submit_s: float | None = None  # on a GPU: what a step costs the host, median
    engine: EngineStep | None = None
    slices: tuple[Slice, ...] = field(default=(), repr=False)  # of the best round, where known
    note: str | None = None

    @property
    def tokens_s(self) -> float:
        return self.point.batch_tokens / self.best_s

    @property
    def name(self) -> str:
        return name_of(self.point) + (f", {self.mode}" if self.mode else "")

    def groups(self) -> dict[str, tuple[int, float]]:
        """Kernels and seconds by group, the longest first."""
        found: dict[str, tuple[int, float]] = {}
        for kernel in (kernel for each in self.operations for kernel in each.kernels):
            calls, seconds = found.get(kernel.group, (0, 0.0))
            found[kernel.group] = calls + kernel.calls, seconds + kernel.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def trace_of(steps: Sequence[StepProfile]) -> dict[str, object]:
    """In the Chrome trace format, for ui.perfetto.dev or chrome://tracing. Where the times of
    single calls are not known: each operation has one slice as long as all its calls, the longest
    first."""
    return {"traceEvents": list(_events(steps)), "displayTimeUnit": "ms"}


def _events(steps: Sequence[StepProfile]) -> Iterator[dict[str, object]]:
    laid = [step.slices or tuple(_laid_out(step.operations)) for step in steps]
    lanes = list(dict.fromkeys(["steps", *(each.lane for slices in laid for each in slices)]))
    for number, name in enumerate(lanes):
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}}
    at_s = 0.0
    for step, slices in zip(steps, laid, strict=True):
        whole_s = max([step.best_s, *(each.began_s + each.seconds for each in slices)])
        whole = Slice(name=step.name, began_s=0.0, seconds=whole_s, lane="steps")
        for each in (whole, *slices):
            yield _event(each, at_s, lanes.index(each.lane))
        at_s += whole_s * 1.05


def _laid_out(operations: Sequence[Operation]) -> Iterator[Slice]:
    """One after the other, as if each ran once."""
    at_s = 0.0
    for each in operations:
        yield Slice(name=f"{each.name} × {each.calls}", began_s=at_s, seconds=each.seconds)
        at_s += each.seconds


def _event(each: Slice, at_s: float, lane: int) -> dict[str, object]:
    began_us, long_us = (at_s + each.began_s) * 1e6, each.seconds * 1e6
    return {"name": each.name, "ph": "X", "pid": 1, "tid": lane, "ts": began_us, "dur": long_us}


def name_of(point: Point) -> str:
    parts = []
    if point.decode_rows:
        parts.append(f"{point.decode_rows} decode after {point.context_tokens}")
    if point.prompt_tokens:
        parts.append(f"prompt of {point.prompt_tokens}")
    return ", ".join(parts)
