"""Where a step's time goes on the CPU, and how close that is to the machine's peak.

Turns the native program's timings into readable rows, with peaks measured on the same threads.
Knows operations by name only; the caller runs the steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backends.cpu import _native


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest rates of all threads together, per second."""

    dots: float  # int8 multiply-adds
    floats: float  # float32 multiply-adds
    bytes: float  # read from memory


@dataclass(frozen=True, slots=True)
class OperationProfile:
    """All instructions of one name since the last profile was taken."""

    name: str
    calls: int
    seconds: float  # until the last thread was done
    worked_s: float  # sum over all threads, without waiting
    multiplies: float
    bytes: float  # of weights or KV blocks, each counted once

    @property
    def quantized(self) -> bool:
        """Whether its multiply-adds are int8; attention and float weights use float32."""
        return "linear" in self.name and " u" in self.name

    def bound_s(self, peaks: Peaks) -> float:
        """The time at the machine's peaks, where computing and reading overlap: a lower bound."""
        rate = peaks.dots if self.quantized else peaks.floats
        return max(self.multiplies / rate, self.bytes / peaks.bytes)


def measure_peaks(threads: int, read_bytes: int, path: str | None = None) -> Peaks:
    return Peaks(*_native.measure_peaks(_native.Pool(threads), read_bytes, path))


def read_profile(program: _native.Program) -> list[OperationProfile]:
    """The timings since the last call, the longest first."""
    found = [OperationProfile(*times) for times in program.take_profile()]
    return sorted(found, key=lambda operation: -operation.seconds)
