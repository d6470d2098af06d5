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
        self._pinned: torch.Tensor | None = None  # made with the first move: most engines have none

    def read(self, blocks: Sequence[int]) -> list[memoryview]:
        found = np.empty((len(blocks), self._kv.block_bytes), np.uint8)
        with self._moving():
            for some in self._pieces(len(blocks)):
                staged = self._staged(len(blocks[some]))
                staged.copy_(self._kv.gather(self._numbers(blocks[some])), non_blocking=True)
                self._wait()
                found[some] = staged.numpy()
        return [copy.data for copy in found]

    def write(self, blocks: Sequence[int], contents: Sequence[Contents]) -> None:
        size = self._kv.block_bytes
        for content in contents:
            if len(content) != size:
                raise ValueError(f"a block's contents have {len(content)} bytes; expected {size}")
        with self._moving():
            for some in self._pieces(len(blocks)):
                staged = self._staged(len(blocks[some]))
                for row, content in zip(staged.numpy(), contents[some], strict=True):
                    row[:] = np.frombuffer(content, np.uint8)
                sent = staged.to(self._device, non_blocking=True)
                self._kv.scatter(self._numbers(blocks[some]), sent)
                self._wait()  # before the staged bytes are written over

    def _pieces(self, count: int) -> Iterator[slice]:
        for at in range(0, count, self._at_once):
            yield slice(at, at + self._at_once)

    def _staged(self, blocks: int) -> torch.Tensor:
        """The host's memory that a piece goes through: pinned, which is up to four times as fast
        for the device as other memory."""
        if self._pinned is None:
            shape = (self._at_once, self._kv.block_bytes)
            self._pinned = torch.empty(
                shape, dtype=torch.uint8, pin_memory=self._stream is not None
            )
        return self._pinned[:blocks]

    def _numbers(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """On the stream for moves."""
        if self._stream is None:
            with torch.inference_mode():
                yield
            return
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield
