"""Ranks over torch.distributed: gloo between processes on CPUs.

A sum gathers all ranks' values and adds them in the order of ranks. gloo's own all-reduce adds in
an order that depends on a value's place in the array, so with three ranks or more the same row
would have other bits in another batch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from headrace.core.errors import DeviceLostError

Values = TypeVar("Values")
Plain = TypeVar("Plain")

# Between two collectives of one step there is only computing; a rank that takes longer is stuck.
TIMEOUT = timedelta(minutes=10)


class TorchRanks:
    """What ranks over torch.distributed have in common. All of them are numbered from the last
    stage to the first, so that the leading rank, which has the logits, is number 0:

    number      0 .. count - 1   | count .. 2 * count - 1 | ...
    stage       the last         | the one before it      |
    """

    def __init__(self, number: int, count: int, stages: int) -> None:
        self.rank, self.count = number % count, count
        self._number, self._all = number, count * stages
        self._group: Any = None  # of this stage; None: everybody
        self._first = number - self.rank  # of this stage

    def _meet(self) -> None:
        """Everybody makes all groups, in the same order."""
        if self.count in (1, self._all):
            return
        for first in range(0, self._all, self.count):
            group = dist.new_group(list(range(first, first + self.count)))
            if first == self._first:
                self._group = group

    @property
    def _next(self) -> int:
        """The rank of the next stage."""
        return self._number - self.count

    @property
    def _before(self) -> int:
        return self._number + self.count

    def share(self, value: Plain) -> Plain:
        box: list[Any] = [value]
        with lost_if_it_fails():
            dist.broadcast_object_list(box, src=0)
        found: Plain = box[0]
        return found

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooRanks(TorchRanks):
    """Until `close`. Every rank makes its own, at the same time."""

    def __init__(self, number: int, count: int, meeting: Path, *, stages: int = 1) -> None:
        """`meeting` is a file that all ranks can reach and that does not exist yet."""
        super().__init__(number, count, stages)
        # All ranks are on this host: names of hosts need not be resolvable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(meeting), self._all)  # type: ignore[attr-defined]
        with lost_if_it_fails():
            dist.init_process_group("gloo", store=store, rank=number, world_size=self._all,
                                    timeout=TIMEOUT)  # fmt: skip
            self._meet()

    def sum(self, values: Values) -> Values:
        if self.count == 1:
            return values
        own = _tensor(values)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with lost_if_it_fails():
            dist.all_gather(found, own, group=self._group)
        total, *others = found
        for other in others:
            total += other
        return _like(total, values)

    def gather(self, values: Values, widths: Sequence[int]) -> Values | None:
        part = _tensor(values)
        own = torch.zeros((len(part), max(widths)), dtype=part.dtype)  # gloo wants equal sizes
        own[:, : part.shape[1]] = part
        found = [torch.empty_like(own) for _ in range(self.count)] if self.rank == 0 else None
        with lost_if_it_fails():
            dist.gather(own, found, dst=self._first, group=self._group)
        if found is None:
            return None
        parts = [part[:, :width] for part, width in zip(found, widths, strict=True)]
        return _like(torch.cat(parts, dim=1), values)

    def send(self, values: Values) -> None:
        with lost_if_it_fails():
            dist.send(_tensor(values), self._next)

    def receive(self, values: Values) -> Values:
        found = torch.empty_like(_tensor(values))
        with lost_if_it_fails():
            dist.recv(found, self._before)
        return _like(found, values)

    def first(self, values: Values) -> Values:
        own = _tensor(values).clone()
        with lost_if_it_fails():
            dist.broadcast(own, src=0)
        return _like(own, values)


def _tensor(values: Any) -> torch.Tensor:
    """In this process's memory: gloo sums nothing on a GPU."""
    if isinstance(values, torch.Tensor):
        return values.cpu().contiguous()
    return torch.from_numpy(np.ascontiguousarray(values))


def _like(found: torch.Tensor, values: Values) -> Values:
    """As what came in: an array, or a tensor on its device."""
    given: Any = values
    result: Any = found.to(given.device) if isinstance(given, torch.Tensor) else found.numpy()
    kept: Values = result
    return kept


@contextlib.contextmanager
def lost_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceLostError(
            "Another process that computes the model with this one is gone or stuck.",
            "The engine starts again with all of its ranks.",
        ) from error
