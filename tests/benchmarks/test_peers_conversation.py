"""Talking to an adapter: answers, errors, crashes, silence and noise, with real processes."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peers.adapter import HttpServer, free_port
from peers.conversation import BENCHMARKS, Conversation, PeerFailure

ADAPTER = """
    import os, signal, subprocess, sys, time
    from peers.adapter import answer_requests

    def add(a, b):
        print("an engine's chatter")
        os.write(1, b"and that of its native code\\n")
        return {"value": a + b}

    def fail():
        raise ValueError("a bad model")

    def crash():
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGILL)

    def leave():
        os._exit(3)

    def hang():
        time.sleep(600)

    def start():
        return {"pid": subprocess.Popen(["sleep", "600"]).pid}

    answer_requests(dict(add=add, fail=fail, crash=crash, leave=leave, hang=hang, start=start))
"""
Start = Callable[[], Conversation]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "pretend_peer.py").write_text(textwrap.dedent(ADAPTER))
    path = f"{tmp_path}{os.pathsep}{BENCHMARKS}"
    begun: list[Conversation] = []

    def begin() -> Conversation:
        talk = Conversation(Path(sys.executable), "pretend_peer", {"PYTHONPATH": path})
        begun.append(talk)
        return talk

    yield begin
    for talk in begun:
        talk.close()


def test_answers_come_through_whatever_the_engine_prints(start: Start) -> None:
    talk = start()
    assert talk.ask("add", 60, a=1, b=2) == {"value": 3}
    assert talk.ask("add", 60, a=2, b=2) == {"value": 4}


def test_an_operation_that_raises_fails_alone(start: Start) -> None:
    talk = start()
    with pytest.raises(PeerFailure, match="ValueError: a bad model"):
        talk.ask("fail", 60)
    with pytest.raises(PeerFailure, match="KeyError: 'unknown'"):
        talk.ask("unknown", 60)
    assert talk.ask("add", 60, a=1, b=1) == {"value": 2}


def test_a_crash_says_its_signal_and_its_last_words(start: Start) -> None:
    talk = start()
    with pytest.raises(PeerFailure, match="signal SIGILL: the last words"):
        talk.ask("crash", 60)
    assert not talk.alive
    with pytest.raises(PeerFailure, match="signal SIGILL"):
        talk.ask("add", 60, a=1, b=1)


def test_a_process_that_leaves_says_its_status(start: Start) -> None:
    with pytest.raises(PeerFailure, match="status 3"):
        start().ask("leave", 60)


def test_silence_ends_the_process(start: Start) -> None:
    talk = start()
    assert talk.ask("add", 60, a=1, b=1) == {"value": 2}
    with pytest.raises(PeerFailure, match=r"hang: no answer in 0\.5 s"):
        talk.ask("hang", 0.5)
    talk.close()
    assert not talk.alive


def runs(pid: int) -> bool:
    """Not so for one that ended and was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_closing_ends_what_the_adapter_started(start: Start) -> None:
    talk = start()
    pid = talk.ask("start", 60)["pid"]
    assert runs(pid)
    talk.close()
    deadline = time.monotonic() + 60
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def test_an_interpreter_that_can_not_start_the_adapter_is_a_failure() -> None:
    talk = Conversation(Path(sys.executable), "peers.no_such_adapter")
    try:
        with pytest.raises(PeerFailure, match="No module named"):
            talk.ask("load", 60)
    finally:
        talk.close()


def test_a_server_that_ends_before_it_is_ready_says_why() -> None:
    program = "import sys; print('starting'); print('ValueError: no weights'); sys.exit(4)"
    with pytest.raises(RuntimeError, match="status 4: ValueError: no weights"):
        HttpServer([sys.executable, "-c", program], free_port(), "/", timeout_s=60)


def test_a_server_that_never_gets_ready_is_stopped() -> None:
    program = "import time; time.sleep(600)"
    with pytest.raises(RuntimeError, match=r"not ready within 0\.5 s"):
        HttpServer([sys.executable, "-c", program], free_port(), "/", timeout_s=0.5)
