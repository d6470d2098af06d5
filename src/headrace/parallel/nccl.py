"""Ranks over NCCL, each with a GPU of its own. Everything is queued on the current stream, and can
be captured into a CUDA graph.

NCCL adds in an order that may depend on a value's place; `ordered` gathers and adds in the order of
ranks instead, for answers that don't depend on their batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.parallel.gloo import TIMEOUT, TorchRanks, lost_if_it_fails

Values = TypeVar("Values")


class NcclRanks(TorchRanks):
    """Until `close`. Every rank makes its own, at the same time, on its current GPU."""

    def __init__(
        self, number: int, count: int, meeting: Path, *, stages: int = 1, ordered: bool = False
    ) -> None:
        super().__init__(number, count, stages)
        self._ordered = ordered and count > 2  # a sum of two has one order
        store = dist.FileStore(str(meeting), self._all)  # type: ignore[attr-defined]
        device = torch.device("cuda", torch.cuda.current_device())
        with lost_if_it_fails():
            dist.init_process_group("nccl", store=store, rank=number, world_size=self._all,
                                    timeout=TIMEOUT, device_id=device)  # fmt: skip
            self._meet()
            # NCCL connects at the first call, which must not be inside a capture.
            one = torch.zeros(1, device=device)
            dist.all_reduce(one)
            dist.all_reduce(one, group=self._group)
            if self._before < self._all:
                self.receive(one)
            if self._next >= 0:
                self.send(one)
            torch.cuda.synchronize(device)

    def sum(self, values: Values) -> Values:
        """In place."""
        if self.count == 1:
            return values
        own: Any = values
        with lost_if_it_fails():
            if not self._ordered:
                dist.all_reduce(own, group=self._group)
                return values
            found = self._gathered(own)
        own.copy_(found[0])
        for other in found[1:]:
            own += other
        return values

    def gather(self, values: Values, widths: Sequence[int]) -> Values | None:
        part: Any = values
        own = torch.zeros((len(part), max(widths)), dtype=part.dtype, device=part.device)
        own[:, : part.shape[1]] = part
        with lost_if_it_fails():
            found = self._gathered(own)
        if self.rank:
            return None
        parts = [found[at][:, :width] for at, width in enumerate(widths)]
        joined: Any = torch.cat(parts, dim=1)
        result: Values = joined
        return result

    def send(self, values: Values) -> None:
        own: Any = values
        with lost_if_it_fails():
            dist.send(own.contiguous(), self._next)

    def receive(self, values: Values) -> Values:
        """In place: `values` are contiguous."""
        own: Any = values
        with lost_if_it_fails():
            dist.recv(own, self._before)
        return values

    def first(self, values: Values) -> Values:
        """In place."""
        own: Any = values
        with lost_if_it_fails():
            dist.broadcast(own, src=0)
        return values

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """[count, *own.shape]"""
        found = torch.empty((self.count, *own.shape), dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(found, own.contiguous(), group=self._group)
        return found
