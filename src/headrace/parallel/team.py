"""The other ranks of an engine: processes that are started, sized together, and end with this one.

Every rank opens the model by itself and says how many blocks fit; the smallest number is used.
Knows how ranks talk while they start, not what they load (rank_process.py does).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.core.children import child_environment, python_command
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import ConfigError, DeviceError, HeadraceError
from headrace.plan.sizing import Sizing

MODULE = "headrace.rank_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a rank is told first."""

    rank: int
    count: int
    meeting: Path  # see parallel/gloo.py
    model_path: Path
    config: EngineConfig
    device: Device  # which the first rank chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the KV pool. A rank says what would fit, and is told what is used."""

    total_blocks: int
    context_tokens: int

    @classmethod
    def of(cls, sizing: Sizing) -> Size:
        return cls(total_blocks=sizing.total_blocks, context_tokens=sizing.context_tokens)

    def put_in(self, sizing: Sizing) -> Sizing:
        return sizing.with_pool(self.total_blocks, self.context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a rank can't start."""

    cause: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    pass


class Team:
    """The followers of an engine, seen from its first rank."""

    def __init__(self, model_path: Path, config: EngineConfig, device: Device) -> None:
        count = config.ranks
        self.count = count
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
        self.meeting = self._folder / "meeting"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection[Any, Any]] = []
        try:
            for rank in range(1, count):
                self._start(rank, model_path, config, device)
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
        for connection in self.connections:
            connection.send(size)
        return size

    def wait(self) -> None:
        """Until every rank has loaded its share."""
        for rank in range(1, self.count):
            self._answer(rank, Loaded)

    def close(self) -> None:
        """End them: each ends when its connection does."""
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, model_path: Path, config: EngineConfig, device: Device) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [*python_command(MODULE), str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                env=_environment(rank, device),
            )
        self._processes.append(process)
        connection: Connection[Any, Any] = Connection(ours.detach())
        self.connections.append(connection)
        start = Start(
            rank=rank,
            count=self.count,
            meeting=self.meeting,
            model_path=model_path,
            config=config,
            device=device,
        )
        with contextlib.suppress(OSError):  # found when its answer is read
            connection.send(start)

    def _answer(self, rank: int, kind: type[Any]) -> Any:
        try:
            answer = self.connections[rank - 1].recv()
        except (EOFError, OSError) as error:
            process = self._processes[rank - 1]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            raise DeviceError(
                f"Rank {rank} of {self.count} ended while it started (exit status "
                f"{process.returncode}).",
                "The lines above say why.",
            ) from error
        if isinstance(answer, Refused):
            raise HeadraceError(
                f"Rank {rank} of {self.count}: {answer.cause}", answer.remedy, detail=answer.detail
            )
        assert isinstance(answer, kind)
        return answer


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
    """Linux: this process is killed when the one that started it ends, even while it is stopped.
    Elsewhere it ends when its connection closes."""
    if sys.platform == "linux":
        import ctypes

        parent_death_signal, kill = 1, 9
        ctypes.CDLL(None).prctl(parent_death_signal, kill)
        if os.getppid() == 1:  # it ended before this call
            os._exit(1)
