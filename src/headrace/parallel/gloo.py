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
    """What ranks over torch.distributed have in common."""

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

    def __init__(self, rank: int, count: int, meeting: Path) -> None:
        """`meeting` is a file that all ranks can reach and that does not exist yet."""
        # All ranks are on this host: names of hosts need not be resolvable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank, self.count = rank, count
        store = dist.FileStore(str(meeting), count)  # type: ignore[attr-defined]
        with lost_if_it_fails():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count,
                                    timeout=TIMEOUT)  # fmt: skip

    def sum(self, values: Values) -> Values:
        own = _tensor(values)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with lost_if_it_fails():
            dist.all_gather(found, own)
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
            dist.gather(own, found, dst=0)
        if found is None:
            return None
        parts = [part[:, :width] for part, width in zip(found, widths, strict=True)]
        return _like(torch.cat(parts, dim=1), values)

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
