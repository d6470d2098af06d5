"""The other ranks of an engine: processes that are started, sized together, and end with this one.

Every rank opens the model by itself and says how many blocks fit; the smallest number is used.
Knows how ranks talk while they start, not what they load (rank_process.py does).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from headrace.core import children
from headrace.core.children import child_environment, python_command
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import ConfigError, DeviceError, HeadraceError
from headrace.parallel.channel import Channel, Loaded, Refused, Size, Start
from headrace.parallel.meeting import Door
from headrace.plan.sizing import Sizing

MODULE = "headrace.rank_process"

log = logging.getLogger(__name__)

M = TypeVar("M")


def size_of(sizing: Sizing) -> Size:
    return Size(total_blocks=sizing.total_blocks, context_tokens=sizing.context_tokens)


def with_size(sizing: Sizing, size: Size) -> Sizing:
    return sizing.with_pool(size.total_blocks, size.context_tokens)


class Team:
    """The followers of an engine, seen from its leading rank. Those of its own stage are processes
    of this host; with a `rank_address` the ranks of other stages come from other hosts."""

    def __init__(
        self, model_path: Path, config: EngineConfig, device: Device, model_hash: str
    ) -> None:
        self.count = config.ranks
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.channels: list[Channel] = []
        self._door: Door | None = None
        self.meeting = str(self._folder / "meeting")
        own = self.count
        try:
            if config.rank_address is not None:
                self._door = Door(config.rank_address)
                self.meeting, own = self._door.meeting, config.tensor_parallel
            start = Start(
                rank=0,
                meeting=self.meeting,
                config=config,
                device=device,
                model_hash=model_hash,
            )
            for rank in range(1, own):
                self._start(replace(start, rank=rank, model_path=str(model_path)))
            if self._door is not None:
                self._let_in(start, range(own, self.count))
        except BaseException:
            self.close()
            raise

    def agree(self, own: Size) -> Size:
        """The smallest pool of all ranks'; every rank is told."""
        sizes = [own, *(self._answer(rank, Size) for rank in range(1, self.count))]
        size = Size(
            total_blocks=min(each.total_blocks for each in sizes),
            context_tokens=min(each.context_tokens for each in sizes),
        )
        for channel in self.channels:
            channel.send(size)
        return size

    def wait(self) -> None:
        """Until every rank has loaded its share."""
        for rank in range(1, self.count):
            self._answer(rank, Loaded)

    def close(self) -> None:
        """End them: each ends when its connection does."""
        if self._door is not None:
            self._door.close()
        for channel in self.channels:
            channel.close()
        for process in self._processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._processes[start.rank] = subprocess.Popen(
                [*python_command(MODULE), str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                env=_environment(start.rank, start.device),
            )
        self._greet(Connection(ours.detach()), start)

    def _let_in(self, start: Start, ranks: range) -> None:
        assert self._door is not None
        log.info("waiting for %s ranks of other hosts at %s", len(ranks), start.config.rank_address)
        for rank, connection in zip(ranks, self._door.wait(len(ranks)), strict=True):
            self._greet(connection, replace(start, rank=rank))

    def _greet(self, connection: Connection[Any, Any], start: Start) -> None:
        channel = Channel(connection)
        self.channels.append(channel)
        with contextlib.suppress(OSError):  # found when its answer is read
            channel.send(start)

    def _answer(self, rank: int, kind: type[M]) -> M:
        try:
            answer = self.channels[rank - 1].receive_any()
        except (EOFError, OSError) as error:
            raise self._ended(rank) from error
        if isinstance(answer, Refused):
            raise HeadraceError(
                f"Rank {rank} of {self.count}: {answer.cause}", answer.remedy, detail=answer.detail
            )
        assert isinstance(answer, kind)
        return answer

    def _ended(self, rank: int) -> DeviceError:
        process, why = self._processes.get(rank), "its connection ended"
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            why = f"exit status {process.returncode}"
        return DeviceError(
            f"Rank {rank} of {self.count} ended while it started ({why}).",
            "The lines above say why, or those of its own host.",
        )


def _environment(rank: int, device: Device) -> dict[str, str]:
    """A rank on a GPU sees only its own, as the first one."""
    found = child_environment()
    if device is Device.CUDA and not found.get("HEADRACE_TEST_RANKS_SHARE_GPU"):
        visible = [each for each in found.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        found["CUDA_VISIBLE_DEVICES"] = visible[rank] if visible else str(rank)
    return found


def check_torch() -> None:
    """Ranks meet through torch.distributed, which is not installed everywhere."""
    try:
        import torch.distributed as dist
    except ImportError:
        dist = None  # type: ignore[assignment]
    if dist is None or not dist.is_available():
        raise ConfigError(
            "The model is to be computed by several ranks, and torch is not installed; expected "
            "it, since ranks meet through torch.distributed.",
            "Install torch, or leave --tensor-parallel and --pipeline-parallel out.",
            param="tensor_parallel",
        )


def end_with_parent() -> None:
    """This process is killed when the one that started it ends, even while it is stopped (Linux).
    Elsewhere it ends when its connection closes."""
    children.end_with_parent(signal.SIGKILL)
    if os.getppid() == 1:  # it ended before this call
        os._exit(1)
