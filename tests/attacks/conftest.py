"""A real server to be attacked, in processes of its own: shared by the tests of a module, and
replaced after a test that harmed it, so that each fails for itself alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from attacked_server import AttackedServer

StartAttacked = Callable[..., AttackedServer]
FLAGS = ("--kv-tokens", "8192", "--max-stored-responses", "50")


@pytest.fixture(scope="module")
def start_attacked(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartAttacked]:
    """Starts one with more flags, or what else AttackedServer takes; stopped with the module."""
    started: list[AttackedServer] = []

    def start(flags: tuple[str, ...] = (), **more: Any) -> AttackedServer:
        folder = tmp_path_factory.mktemp("attacked")
        server = AttackedServer(folder, [*FLAGS, *flags], model=str(default_model_path), **more)
        started.append(server)
        server.wait_ready()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def _holder() -> list[AttackedServer]:
    return []


@pytest.fixture
def attacked(start_attacked: StartAttacked, _holder: list[AttackedServer]) -> AttackedServer:
    """The module's server, as good as new."""
    if _holder and not _is_unharmed(_holder[0]):
        _holder.pop().process.kill()
    if not _holder:
        _holder.append(start_attacked())
    return _holder[0]


def _is_unharmed(server: AttackedServer) -> bool:
    if not server.is_ready_within(5) or server.restarts() or server.wait_free(5) != 0:
        return False
    before_s = server.cpu_s()
    time.sleep(0.5)
    return server.cpu_s() - before_s < 0.1  # nobody asks for anything
