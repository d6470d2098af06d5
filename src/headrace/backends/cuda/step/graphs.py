"""CUDA graphs: launches are captured once for each shape and replayed with a single host call.

Shapes are buckets of rows; a step is padded up to the next bucket. Graphs are captured at start or
when they are first needed, share one memory pool, and are limited in number: other shapes are
launched kernel by kernel, and so is everything without a GPU, so that the same code can be tested
anywhere. Knows nothing of what the launches do.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator

import torch

from headrace.backends.cuda.step.shapes import GRAPH_ROWS, MOST_GRAPHS

_SIGHTINGS = 3  # how often a larger or rarer shape must occur before it is captured
_LARGEST_ROWS = 2048  # for larger steps the device takes longer than the host's launches


class Graphs:
    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._device = device
        self._enabled = enabled and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self._seen: dict[Hashable, int] = {}
        self.nbytes = 0  # what captures took of the device's memory

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self, key: Hashable, launch: Callable[[], None], rows: int, *, at_once: bool = True
    ) -> bool:
        """Replay the graph of `key`. Without one, capture it first if there is room and the shape
        is frequent, or small and to be captured `at_once`; otherwise launch. Returns whether it ran
        as it will from now on: no capture, no compilation, no launches before a later capture."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return True
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        often = seen >= _SIGHTINGS or (at_once and rows <= GRAPH_ROWS)
        may_capture = self._enabled and rows <= _LARGEST_ROWS and len(self._graphs) < MOST_GRAPHS
        if may_capture and often:
            self.capture(key, launch, is_new=seen == 1)
            self._graphs[key].replay()
        else:
            launch()
        return not (may_capture or (seen == 1 and self._enabled))

    def capture(self, key: Hashable, launch: Callable[[], None], *, is_new: bool = True) -> None:
        """Capture a graph; capturing computes nothing. The first launch of a kernel may compile it,
        which must not happen during a capture. So new launches run once for real before, and the
        caller must provide inputs for which that is harmless."""
        if not self._enabled or key in self._graphs:
            return
        if is_new:
            launch()
        torch.cuda.synchronize(self._device)
        before = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        with _no_collection():
            # On the runner's own stream: other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        self._graphs[key] = graph
        self.nbytes += max(0, before - torch.cuda.mem_get_info(self._device)[0])

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """For profiles: until it ends, everything is launched kernel by kernel."""
        kept = self._graphs, self._enabled
        self._graphs, self._enabled = {}, False
        try:
            yield
        finally:
            self._graphs, self._enabled = kept

    def forget(self) -> None:
        """Drop all graphs, because the launches have changed."""
        self._graphs.clear()
        self._seen.clear()
        if self._enabled:  # a memory pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()

    def close(self) -> None:
        self._graphs.clear()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: freeing a tensor would break a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
