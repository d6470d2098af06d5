"""Where a step's time goes on a GPU: its kernels, by instruction, from graphs and one by one.

Steps run under torch's profiler, each instruction's launches inside a range. In a graph there are
no ranges, so its kernels are recognized by their order. `ranged` only marks steps and instructions
with NVTX ranges, for Nsight Systems, which can't be used together with torch's profiler. Knows the
runner and its program; calibrate/ decides which steps are run and sums up.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headrace.backends.cuda.costs import Cost, cost_of
from headrace.backends.cuda.kernel_trace import (
    INSTRUCTION,
    STEP,
    KernelRun,
    named_as,
    read_steps,
    with_instructions,
)
from headrace.backends.cuda.runner import CudaRunner
from headrace.models.counting_ops import Chunk

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of torch's profiler about itself

# Graphs of rarer shapes are captured when they are seen for the third time.
WARM_STEPS = 4
_BETWEEN_S = 0.001  # host and device share a clock, but not to the microsecond


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKernels:
    whole_s: float  # on the host: submitted and collected, with the profiler's own cost
    kernels: tuple[KernelRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A step without a profiler."""

    whole_s: float
    submit_s: float  # of it, until submit() returned
    device_s: float  # between its first and its last event on the device


class StepProfiler:
    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self._is_gpu = runner.device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        self._activities = [*activities, ProfilerActivity.CUDA] if self._is_gpu else activities

    @property
    def has_graphs(self) -> bool:
        return self._runner.graphs.is_enabled

    def costs(self, chunks: Sequence[Chunk]) -> list[Cost]:
        """Of every instruction, by its number."""
        kv_dtype = self._runner.kv_dtype
        return [cost_of(each, chunks, kv_dtype) for each in self._runner.program.instructions]

    def plain(self, step: Callable[[], Plain], rounds: int, *, graphs: bool) -> list[Plain]:
        with self._mode(graphs):
            for _ in range(WARM_STEPS):
                step()
            return [step() for _ in range(rounds)]

    def profiled(
        self, step: Callable[[], Plain], rounds: int, *, graphs: bool
    ) -> list[StepKernels]:
        """Kernels of each round. From graphs, instructions are known only if the same step,
        launched one by one, has the same kernels."""
        launched = self._traced(step, 2 if graphs else rounds, is_graph=False)
        if not graphs:
            return launched
        known = launched[-1].kernels
        found = self._traced(step, rounds, is_graph=True)
        if not named_as([each.kernels for each in found], known):
            return found
        return [
            StepKernels(whole_s=each.whole_s, kernels=tuple(with_instructions(each.kernels, known)))
            for each in found
        ]

    def ranged(self, step: Callable[[], Plain], rounds: int, *, graphs: bool) -> None:
        """Steps in NVTX ranges, between the calls that Nsight's --capture-range waits for."""
        with self._mode(graphs), self._ranges(nvtx=True):
            step()
            if self._is_gpu:
                torch.cuda.profiler.start()
            try:
                for _ in range(rounds):
                    with self._range(STEP, nvtx=True):
                        step()
            finally:
                if self._is_gpu:
                    torch.cuda.profiler.stop()

    def _traced(
        self, step: Callable[[], Plain], rounds: int, *, is_graph: bool
    ) -> list[StepKernels]:
        wholes = []
        ranges = contextlib.nullcontext() if is_graph else self._ranges()
        with self._mode(is_graph), ranges:
            for _ in range(WARM_STEPS):
                step()
            with profile(activities=self._activities, acc_events=True) as taken:
                for _ in range(rounds):
                    time.sleep(_BETWEEN_S)
                    with self._range(STEP):
                        wholes.append(step().whole_s)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            taken.export_chrome_trace(str(path))
            steps = read_steps(json.loads(path.read_text()))
        return [
            StepKernels(whole_s=whole_s, kernels=tuple(kernels))
            for whole_s, kernels in zip(wholes, steps, strict=True)
        ]

    def _mode(self, graphs: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if graphs else self._runner.graphs.switched_off()

    @contextlib.contextmanager
    def _ranges(self, *, nvtx: bool = False) -> Iterator[None]:
        """Every instruction's launches inside a range with its number, or for NVTX its name."""
        names = [cost.name for cost in self.costs([Chunk(tokens=1)])]

        def mark(number: int) -> contextlib.AbstractContextManager[None]:
            return self._range(names[number] if nvtx else f"{INSTRUCTION}{number}", nvtx=nvtx)

        with self._runner.program.marked(mark):
            yield

    @contextlib.contextmanager
    def _range(self, name: str, *, nvtx: bool = False) -> Iterator[None]:
        if not nvtx:
            with record_function(name):
                yield
            return
        if self._is_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if self._is_gpu:
                torch.cuda.nvtx.range_pop()
