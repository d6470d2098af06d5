"""The supervisor over engine processes that die, hang or dawdle on command."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import ClientTimeoutError, HeadraceError, UnavailableError
from headrace.core.request import FinishReason, GenerateRequest, SamplingParams
from headrace.server.link import supervisor as supervising
from headrace.server.link import wire
from headrace.server.link.engine_link import ENGINE_COMMAND
from headrace.server.link.engine_process import Link
from headrace.server.link.frames import Encoder
from headrace.server.link.supervisor import EngineGoneError, State, Supervisor

SCRIPTED = Path(__file__).with_name("scripted_engine.py")
LOSING = Path(__file__).with_name("losing_engine.py")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def _short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "FIRST_BACK_OFF_S", 0.01)


def make(what: str, *, hang_timeout_s: float = 30.0, max_restarts: int = 2) -> Supervisor:
    return Supervisor(
        wire.Configure(
            model_path="none",
            engine=EngineConfig(),
            log_level="info",
            log_format="json",
            grammars_bytes=1 << 30,
        ),
        hang_timeout_s=hang_timeout_s,
        max_restarts=max_restarts,
        command=(sys.executable, str(SCRIPTED), what),
    )


def tiny(folder: Path, settings: dict[str, Any], command: Sequence[str]) -> Supervisor:
    """Over a real engine process with a model of nearly nothing."""
    (folder / "config.json").write_text(json.dumps(TINY))
    sizes = {"max_batch_tokens": 16, "kv_tokens": 512}
    small = {"device": "reference", "load_format": "dummy", **sizes}
    return Supervisor(
        wire.Configure(
            model_path=str(folder),
            engine=EngineConfig.from_mapping(small | settings),
            log_level="info",
            log_format="json",
            grammars_bytes=1 << 30,
        ),
        hang_timeout_s=30.0,
        max_restarts=1,
        command=command,
    )


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, HeadraceError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def request(name: str, prompt: list[int]) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams())


async def answer_of(supervisor: Supervisor, wanted: GenerateRequest) -> list[int]:
    found: list[int] = []
    with supervisor.engine.stream(wanted) as stream:
        while True:
            for _, token_id, _, reason, _ in await stream.tokens():
                if reason is not None:
                    return found
                found.append(token_id)


def test_requests_go_in_and_their_own_tokens_come_out() -> None:
    async def play() -> None:
        supervisor = make("serve")
        async with running(supervisor):
            with pytest.raises(UnavailableError, match="starting"):
                _ = supervisor.engine
            await until(lambda: supervisor.state is State.READY)
            found = await asyncio.gather(
                *(answer_of(supervisor, request(f"r{i}", [i, i + 1])) for i in range(20))
            )
            assert found == [[i, i + 1] for i in range(20)]
            assert supervisor.engine.open_requests == 0

    asyncio.run(play())


def test_an_engine_that_never_gets_ready_is_given_up_after_so_many_tries() -> None:
    async def play() -> None:
        supervisor = make("die-at-start", max_restarts=2)
        with pytest.raises(EngineGoneError, match=r"ended with 7; that was failure 3 in a row"):
            await supervisor.run()
        assert supervisor.state is State.STOPPED
        assert supervisor.restarts == 2

    asyncio.run(play())


def test_a_model_that_can_not_be_loaded_is_not_tried_again() -> None:
    async def play() -> None:
        supervisor = make("broken")
        with pytest.raises(HeadraceError, match="teapot"):
            await supervisor.run()
        assert supervisor.restarts == 0

    asyncio.run(play())


def test_requests_of_a_dead_engine_end_with_a_clean_error_and_new_ones_wait() -> None:
    async def play() -> None:
        supervisor = make("die-on-add", max_restarts=50)
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            with pytest.raises(UnavailableError, match="ended with 9") as caught:
                await answer_of(supervisor, request("a", [1]))
            assert caught.value.status == 503
            assert caught.value.retry_after_s > 0
            await until(lambda: supervisor.restarts == 1 and supervisor.state is State.READY)

    asyncio.run(play())


def test_an_engine_that_lost_its_device_fails_its_requests_and_is_replaced(tmp_path: Path) -> None:
    """The one whose step it was hears why, the one that waited hears that the engine ended (with
    3), and the next engine answers both."""
    first, second = (
        GenerateRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            params=SamplingParams(temperature=0, max_tokens=8),
        )
        for name in ("first", "second")
    )

    async def play() -> None:
        command = sys.executable, str(LOSING), str(tmp_path / "happened")
        supervisor = tiny(tmp_path, {"max_sequences": 1}, command)
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            link = supervisor.engine
            with link.stream(first) as computing, link.stream(second) as waiting:
                found: list[wire.Row] = []
                while not found or found[-1][3] is None:
                    found += await computing.tokens()
                with pytest.raises(UnavailableError, match="ended with 3 while") as caught:
                    await waiting.tokens()
            assert len(found) == 3
            _, _, _, reason, extra = found[-1]
            assert reason is FinishReason.ERROR
            assert extra is not None
            assert "The GPU failed: an illegal address." in (extra.error or "")
            assert caught.value.status == 503
            await until(lambda: supervisor.restarts == 1 and supervisor.state is State.READY)
            assert supervisor.engine.pid != link.pid
            answers = await asyncio.gather(
                *(answer_of(supervisor, wanted) for wanted in (first, second))
            )
            assert answers[0] == answers[1]
            assert answers[0][:2] == [token_id for _, token_id, *_ in found[:2]]

    asyncio.run(play())


def test_an_engine_whose_message_can_not_be_decoded_is_killed_and_replaced() -> None:
    async def play() -> None:
        supervisor = make("garbled", max_restarts=50)
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            with pytest.raises(UnavailableError, match="killed by signal 9") as caught:
                async with asyncio.timeout(60):
                    await answer_of(supervisor, request("a", [1]))
            assert caught.value.status == 503
            await until(lambda: supervisor.restarts == 1 and supervisor.state is State.READY)

    asyncio.run(play())


def test_what_is_said_of_requests_that_are_not_there_changes_nothing() -> None:
    async def play() -> None:
        supervisor = make("confused")
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            assert await answer_of(supervisor, request("a", [1, 2, 3])) == [1, 2, 3]
            assert supervisor.restarts == supervisor.engine.unread.total == 0

    asyncio.run(play())


def test_an_engine_knows_requests_by_their_numbers(tmp_path: Path) -> None:
    """Numbers that it has not are let be; an id that is in use is not taken twice, and whoever had
    it first goes on; a number's end makes its id free."""
    supervisor = tiny(tmp_path, {"max_sequences": 2}, ENGINE_COMMAND)

    async def play() -> None:
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            link = supervisor.engine
            link.send(wire.Cancel(10**6))
            link.send(wire.StopOne(10**6, 0))
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            wanted = GenerateRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=params)
            with link.stream(wanted) as first:
                await first.tokens()
                with pytest.raises(HeadraceError, match="'a' is in use"):
                    await answer_of(supervisor, wanted)
                reason = None
                while reason is None:
                    _, _, _, reason, _ = (await first.tokens())[-1]
                assert reason is FinishReason.LENGTH
            assert len(await answer_of(supervisor, wanted)) == 63  # and the last, with its end
            assert supervisor.restarts == 0

    asyncio.run(play())


def test_a_hung_engine_is_killed_and_replaced() -> None:
    async def play() -> None:
        supervisor = make("hang-on-add", hang_timeout_s=0.5, max_restarts=50)
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            with pytest.raises(UnavailableError, match="made no progress"):
                await answer_of(supervisor, request("a", [1]))
            await until(lambda: supervisor.restarts == 1 and supervisor.state is State.READY)

    asyncio.run(play())


def test_an_engine_that_falls_silent_is_killed_too() -> None:
    async def play() -> None:
        supervisor = make("silent", hang_timeout_s=0.3, max_restarts=50)
        async with running(supervisor):
            await until(lambda: supervisor.restarts >= 1)

    asyncio.run(play())


def test_a_long_step_that_makes_progress_is_no_hang() -> None:
    async def play() -> None:
        supervisor = make("slow-on-add", hang_timeout_s=2.0)
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            assert await answer_of(supervisor, request("a", [5])) == [5]
            assert supervisor.restarts == 0

    asyncio.run(play())


def test_a_server_that_stood_still_itself_does_not_blame_the_engine() -> None:
    async def play() -> None:
        supervisor = make("serve", hang_timeout_s=1.0)
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            time.sleep(2.5)  # nothing runs in this process
            await asyncio.sleep(0.5)
            assert supervisor.restarts == 0
            assert await answer_of(supervisor, request("a", [5])) == [5]

    asyncio.run(play())


def test_stopping_leaves_no_process_behind() -> None:
    async def play() -> int:
        supervisor = make("serve")
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            pid = supervisor.engine.pid
        return pid

    pid = asyncio.run(play())
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_machine_without_room_for_a_process_is_no_broken_engine(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Tried again for longer than a broken engine would be, and then all is well."""
    start, failures = asyncio.create_subprocess_exec, iter(range(6))

    async def failing(*arguments: Any, **options: Any) -> Any:
        if next(failures, None) is not None:
            raise OSError(number, os.strerror(number))
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)

    async def play() -> None:
        supervisor = make("serve", max_restarts=0)
        before = open_descriptors()
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            assert await answer_of(supervisor, request("a", [5])) == [5]
            assert supervisor.restarts == 0
        assert open_descriptors() <= before + 1  # the loop's own, for children's ends

    asyncio.run(play())


def test_a_command_that_is_not_there_is_given_up_at_once() -> None:
    async def play() -> None:
        supervisor = make("serve")
        supervisor._command = ("/nowhere/python",)
        with pytest.raises(EngineGoneError, match="can't be started"):
            await supervisor.run()

    asyncio.run(play())


def test_messages_come_over_a_descriptor_that_select_does_not_know() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip("this machine allows no descriptor that high")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    ours, theirs = socket.socketpair()
    high = fcntl.fcntl(theirs, fcntl.F_DUPFD, 1200)
    theirs.close()
    link = Link(socket.socket(fileno=high))
    try:
        assert link.receive(0.0) == []
        ours.sendall(Encoder().frame(wire.Shutdown()))
        assert link.receive(10.0, high) == [wire.Shutdown()]
        ours.close()
        assert link.receive(10.0) == []
        assert link.closed
    finally:
        link._socket.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_slow_readers_leave_unread_is_bounded() -> None:
    """The stream that has most of it ends with an error; another goes on."""

    async def play() -> None:
        supervisor = make("serve")
        async with running(supervisor):
            await until(lambda: supervisor.state is State.READY)
            link = supervisor.engine
            link.unread.most = 1000
            with link.stream(request("slow", [7] * 990)) as slow:
                await until(lambda: link.unread.total == 991)  # and the end
                with link.stream(request("other", [8] * 20)) as other:
                    found: list[wire.Row] = []
                    while not found or found[-1][3] is None:
                        found += await other.tokens()
                        await asyncio.sleep(0.01)
                    assert len(found) == 21
                with pytest.raises(ClientTimeoutError, match="read more slowly"):
                    await slow.tokens()
            assert link.unread.total == 0
            assert link.open_requests == 0

    asyncio.run(play())
