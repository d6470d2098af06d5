"""Stored answers of /v1/responses: who asks for one, or continues it, gets to who has it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.router.fakes import FakeReplica, Got, ask, get, plain, rig

from headrace.policies.routing import Routing
from headrace.router.stored import Home, NotStoredError, Stored

PATH = "/v1/responses"


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


async def store(replica: FakeReplica, got: Got, writer: asyncio.StreamWriter) -> None:
    """As a server does: 404 for what it does not have."""
    target = got.head.split(b" ")[1].decode()
    wanted = json.loads(got.body or b"{}").get("previous_response_id")
    if target != PATH:
        wanted = target.split("/")[3]
    if wanted and not wanted.startswith(f"resp_{replica.name}"):
        writer.write(plain(404, {"error": {"message": "not found"}}))
        return
    writer.write(plain(200, {"object": "response", "id": f"resp_{replica.name}{len(replica.got)}"}))


def body(**more: object) -> bytes:
    return json.dumps({"input": "hello", **more}).encode()


def test_a_conversation_stays_with_its_answers() -> None:
    async def main() -> None:
        replicas = [FakeReplica(name=name, behave=store) for name in "abc"]
        async with rig(*replicas, routing=Routing.ROUND_ROBIN) as r:
            ids = []
            for _ in range(3):
                answered = await ask(r.port, body(), path=PATH)
                ids.append(json.loads(answered.body)["id"])
            assert {each[5] for each in ids} == {"a", "b", "c"}
            for each in ids * 2:
                answered = await ask(r.port, body(previous_response_id=each), path=PATH)
                assert (answered.status, json.loads(answered.body)["id"][5]) == (200, each[5])
            for each in ids:
                assert (await get(r.port, f"{PATH}/{each}")).status == 200
            before = sum(r.router.counts.retries.values())
            # A router that was started anew asks one after the other.
            r.router.stored = Stored()
            for each in reversed(ids):
                answered = await ask(r.port, body(previous_response_id=each), path=PATH)
                assert (answered.status, json.loads(answered.body)["id"][5]) == (200, each[5])
            assert sum(r.router.counts.retries.values()) > before
            answered = await ask(r.port, body(previous_response_id="resp_z"), path=PATH)
            assert answered.status == 404
            # An ordinary 404 is an answer.
            answered = await ask(r.port, body(), path="/v1/nothing")
            assert answered.status == 404

    run(main())


def test_an_id_is_found_wherever_the_answer_is_cut() -> None:
    data = b'event: x\ndata: {"response": {"id": "resp_12ab-_"}, "id": "resp_other"}'
    for cut in range(len(data)):
        stored, written = Stored(), list[bytes]()
        write = stored.reading(data[:cut], Home(7, None), written.append)
        for at in range(cut, len(data)):
            write(data[at : at + 1])
        assert b"".join(written) == data[cut:]
        assert stored.find("resp_12ab-_", None) == 7


def test_answers_belong_to_a_key_and_the_oldest_is_forgotten() -> None:
    stored = Stored(most=2)
    stored.keep("resp_1", Home(1, "ann"))
    assert stored.find("resp_1", "ann") == 1
    for other in ("ben", None):
        with pytest.raises(NotStoredError):
            stored.find("resp_1", other)
    stored.keep("resp_2", Home(2, None))
    stored.keep("resp_3", Home(2, None))
    assert stored.find("resp_1", "ann") is None


def test_an_answer_without_an_id_is_looked_at_no_further() -> None:
    stored, written = Stored(), list[bytes]()
    write = stored.reading(b"", Home(1, None), written.append)
    write(b"x" * 5000)
    write(b'"id": "resp_late"')
    assert stored.find("resp_late", None) is None
    assert len(written) == 2
