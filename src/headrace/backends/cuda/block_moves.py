"""Blocks out of the device's KV pool and back into it, on a stream of their own.

So a copy does not wait for the step that is being computed, nor that step for the copy. Goes
through some memory at a time: the ledger does not count it. Knows nothing of what is in flight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from headrace.backends.cuda.kv import KvPool
from headrace.core.step import Contents

MOST_BYTES = 16 << 20  # moved at a time, twice that on the device while they are rearranged


class BlockMoves:
    def __init__(self, kv: KvPool, device: torch.device) -> None:
        self._kv = kv
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._at_once = max(1, MOST_BYTES // kv.block_bytes)

    def read(self, blocks: Sequence[int]) -> list[memoryview]:
        found = torch.empty((len(blocks), self._kv.block_bytes), dtype=torch.uint8)
        with self._moving():
            for some in self._pieces(len(blocks)):
                found[some] = self._kv.gather(self._numbers(blocks[some])).cpu()
        return [memoryview(copy) for copy in found.numpy()]

    def write(self, blocks: Sequence[int], contents: Sequence[Contents]) -> None:
        with self._moving():
            for some in self._pieces(len(blocks)):
                parts = [np.frombuffer(content, np.uint8) for content in contents[some]]
                sent = torch.from_numpy(np.stack(parts)).to(self._device)
                self._kv.scatter(self._numbers(blocks[some]), sent)

    def _pieces(self, count: int) -> Iterator[slice]:
        for at in range(0, count, self._at_once):
            yield slice(at, at + self._at_once)

    def _numbers(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """On the stream for moves; all is done at the end."""
        if self._stream is None:
            with torch.inference_mode():
                yield
            return
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield
        self._stream.synchronize()
