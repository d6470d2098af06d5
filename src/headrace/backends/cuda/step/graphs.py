"""Launches captured once for each shape and replayed: a step then costs the host one call.

Shapes are buckets of rows; a step is padded up to the next. Graphs are captured when they are first
needed or at start, share one memory pool, and are bounded in number: what does not fit is launched
one by one. Without a GPU every call is launched, so that the same code is tested anywhere. Knows
nothing of what the launches do.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator

import torch

# Close where rows cost something: a padded row is computed like any other. Past 128 rows tiles of
# 64 rows are the measure.
_BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_BUCKETS += (320, 384, 448, 512)
GRAPH_ROWS = _BUCKETS[-1]
_LARGE_STEP = 128  # rows between the buckets past those: what a large tile computes anyway
_SIGHTINGS = 3  # of a larger or rarer shape, before it is worth the time of a capture
_LARGEST_ROWS = 2048  # past these a step takes the device longer than its launches take the host
LAUNCH_BYTES = 8 << 10  # that a captured launch takes on the device: an estimate
MOST_GRAPHS = 160


def row_bucket(rows: int, most: int) -> int:
    """What `rows` are padded to."""
    at = bisect.bisect_left(_BUCKETS, rows)
    bucket = _BUCKETS[at] if at < len(_BUCKETS) else -(-rows // _LARGE_STEP) * _LARGE_STEP
    return min(bucket, most)


def row_buckets(most: int) -> list[int]:
    return sorted({min(bucket, most) for bucket in _BUCKETS})


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
    ) -> None:
        """Replay what was captured under `key`; capture it first if there is room and it comes
        again and again, or is small and to be captured `at_once`; otherwise launch."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        often = seen >= _SIGHTINGS or (at_once and rows <= GRAPH_ROWS)
        often = often and rows <= _LARGEST_ROWS
        if self._enabled and often and len(self._graphs) < MOST_GRAPHS:
            self.capture(key, launch, is_new=seen == 1)
            self._graphs[key].replay()
        else:
            launch()

    def capture(self, key: Hashable, launch: Callable[[], None], *, is_new: bool = True) -> None:
        """Nothing of what is captured is computed. The first launch of a kernel may compile it and
        must not be a captured one: what is new is launched once before, for real, so callers see
        to it that inputs make no mischief."""
        if not self._enabled or key in self._graphs:
            return
        if is_new:
            launch()
        torch.cuda.synchronize(self._device)
        before = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        with _no_collection():
            # On the runner's own stream; other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        self._graphs[key] = graph
        self.nbytes += max(0, before - torch.cuda.mem_get_info(self._device)[0])

    def forget(self) -> None:
        """As if nothing had been seen: what is launched is another thing from now on."""
        self._graphs.clear()
        self._seen.clear()
        if self._enabled:  # a memory pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()

    def close(self) -> None:
        self._graphs.clear()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Freeing a tensor's memory by chance would spoil a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
