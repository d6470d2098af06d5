"""How ranks talk, and how those of other hosts are let in: typed messages, and a key."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.children import child_environment
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import ConfigError, DeviceError
from headrace.core.settings import OTHER_VARIABLES
from headrace.parallel import meeting
from headrace.parallel.channel import (
    Channel,
    Close,
    Collect,
    Loaded,
    MessageError,
    Refused,
    Size,
    Start,
    Submit,
    decode,
    encode,
)
from headrace.parallel.meeting import Door, knock, parse_address
from headrace.parallel.plans import SentPlan

KEY = "a secret of enough characters"
CONFIG = EngineConfig.from_mapping(
    {"device": "reference", "tensor_parallel": 3, "pipeline_parallel": 2, "kv_memory": "1GiB"}
)
ints = st.integers(0, 2**31)
plans = st.builds(
    SentPlan,
    sequence_ids=st.lists(ints),
    counts=st.lists(ints),
    starts=st.lists(ints),
    token_ids=st.lists(st.integers(-1, 10**6)),
    versions=st.lists(ints),
    known=st.lists(ints),
    entries=st.lists(st.lists(ints)),
    drawing=st.lists(ints),
    scored=st.lists(ints),
    drafts=st.dictionaries(ints, ints),
    copies=st.lists(st.tuples(ints, ints)),
)


@given(plans)
def test_a_plan_arrives_as_it_was_sent(plan: SentPlan) -> None:
    assert decode(encode(Submit(plan))) == Submit(plan)


@pytest.mark.parametrize(
    "message",
    [
        Start(
            rank=4,
            meeting="tcp:10.0.0.1:7001",
            config=CONFIG,
            device=Device.REFERENCE,
            model_hash="ab",
        ),
        Size(total_blocks=3, context_tokens=48),
        Refused(cause="no", remedy="none"),
        Loaded(),
        Collect(),
        Close(),
    ],
)
def test_every_message_arrives(message: Any) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "frame",
    [b"", b"[]", b"{}", b'["Size", {}]', b'["Popen", {"args": "x"}]', b'["Start", 3]', b"\x80\x04"],
)
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(MessageError):
        decode(frame)


def test_a_message_of_another_kind_is_refused() -> None:
    ours, theirs = socket.socketpair()
    one, other = Channel(Connection(ours.detach())), Channel(Connection(theirs.detach()))
    one.send(Loaded())
    with pytest.raises(MessageError, match="sent Loaded; expected Size"):
        other.receive(Size)
    one.close()
    other.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_only_those_with_the_key_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.KEY_VARIABLE, KEY)
    address = f"127.0.0.1:{free_port()}"
    door = Door(address)
    let_in: list[Connection[Any, Any]] = []
    waiting = threading.Thread(target=lambda: let_in.extend(door.wait(1)))
    waiting.start()
    with socket.create_connection(parse_address(address)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(64, b"x"))
        while stranger.recv(4096):  # its nonce, its proof, and the end
            pass
    monkeypatch.setenv(meeting.KEY_VARIABLE, KEY + " of others")
    with pytest.raises(DeviceError, match="did not accept"):
        knock(address)
    assert not let_in
    monkeypatch.setenv(meeting.KEY_VARIABLE, KEY)
    Channel(knock(address)).send(Loaded())
    waiting.join(timeout=10)
    assert Channel(let_in[0]).receive(Loaded) == Loaded()
    let_in[0].close()
    door.close()


@pytest.mark.parametrize("text", ["", "host", ":7000", "host:", "host:x", "host:0", "host:65535"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        parse_address(text)


def test_a_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="it has 5 characters, expected 16 or more"):
        Door(f"127.0.0.1:{free_port()}")
    monkeypatch.setenv(meeting.KEY_VARIABLE, KEY)
    with pytest.raises(ConfigError, match="can't be waited for"):
        Door("192.0.2.1:7000")


def test_the_key_is_no_unknown_setting_and_reaches_the_engines_process() -> None:
    assert meeting.KEY_VARIABLE in OTHER_VARIABLES
    assert child_environment({meeting.KEY_VARIABLE: KEY, "OTHER_KEY": "x"}) == {
        meeting.KEY_VARIABLE: KEY,
        **child_environment({}),
    }


def test_ranks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.KEY_VARIABLE, KEY)
    monkeypatch.setattr(meeting, "JOIN_S", 0.05)
    door = Door(f"127.0.0.1:{free_port()}")
    with pytest.raises(DeviceError, match="0 of 2 ranks of other hosts came"):
        door.wait(2)
    door.close()
