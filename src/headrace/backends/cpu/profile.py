"""Where a step's time goes on the CPU, and how near that is to what the machine can do.

Turns the native program's notes into rows that can be read, beside peaks measured on the same
threads. Knows operations by their names alone; who runs the steps is the caller's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backends.cpu import _native


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that all threads together reached, a second."""

    dots: float  # int8 multiply-adds
    floats: float  # float32 multiply-adds
    bytes: float  # read from memory


@dataclass(frozen=True, slots=True)
class OperationProfile:
    """All instructions of one name since the last time."""

    name: str
    calls: int
    seconds: float  # until the last thread was done
    worked_s: float  # of all threads, waiting left out
    multiplies: float
    bytes: float  # of weights or KV blocks, each counted once

    @property
    def quantized(self) -> bool:
        """Its multiply-adds are of int8; those of attention and of float weights are of floats."""
        return "linear" in self.name and " u" in self.name

    def bound_s(self, peaks: Peaks) -> float:
        """The least that it would take at the machine's peaks: computing and reading overlap."""
        rate = peaks.dots if self.quantized else peaks.floats
        return max(self.multiplies / rate, self.bytes / peaks.bytes)


def measure_peaks(threads: int, read_bytes: int, path: str | None = None) -> Peaks:
    return Peaks(*_native.measure_peaks(_native.Pool(threads), read_bytes, path))


def read_profile(program: _native.Program) -> list[OperationProfile]:
    """What was noted since the last time, the longest first."""
    found = [OperationProfile(*times) for times in program.take_profile()]
    return sorted(found, key=lambda operation: -operation.seconds)
