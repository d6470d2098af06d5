"""A server's model is the catalog's bit by bit, at its start and whenever its engine is started
again."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.server.conftest import RunningServer

from headrace.fetch.catalog import CATALOG, DEFAULT_NAME, cached_path


def start(model: Path, folder: Path) -> RunningServer:
    return RunningServer(model, folder, {}, {"kv_tokens": 1024, "context_tokens": 256})


def test_a_flipped_bit_is_not_served(
    default_model_path: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cached_path(CATALOG[DEFAULT_NAME])
    path.parent.mkdir(parents=True)
    shutil.copyfile(default_model_path, path)
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))
    running = start(path, tmp_path)
    try:
        running.wait_ready()
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(before.st_size // 2)
            (byte,) = file.read(1)
            file.seek(before.st_size // 2)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        (engine,) = running.engine_pids()
        os.kill(engine, signal.SIGKILL)
        assert running.process.wait(60) != 0  # it is not restarted with other weights
        assert "as it was when the server started" in running.log
    finally:
        running.stop()
    refused = start(path, tmp_path)
    assert refused.process.wait(60) == 2
    assert CATALOG[DEFAULT_NAME].sha256 in refused.log
    assert f"headrace pull {DEFAULT_NAME}" in refused.log
    assert path.stat().st_size == before.st_size
