"""A whole run against scripted endpoints on real sockets. No time decides anything."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.bench.fake_endpoint import (
    FakeEndpoint,
    answered,
    changed,
    event,
    refusal,
    response,
    words_of,
)

from headrace.bench.record import CountedBy
from headrace.bench.run import Stop
from headrace.bench.session import Asked, Session, run_session
from headrace.bench.spend import Purse
from headrace.bench.summary import Summary
from headrace.client.connection import Unreachable, parse_address
from headrace.core.errors import ConfigError
from headrace.hardware.api_prices import parse_api
from headrace.workload.arrivals import ClosedLoop
from headrace.workload.distribution import Constant
from headrace.workload.workload import Synthetic, fixed

WORKLOAD = Synthetic(prompts=fixed(100), outputs=fixed(6), arrivals=ClosedLoop(clients=3))


def measured(
    endpoint: FakeEndpoint, workload: Synthetic = WORKLOAD, **more: Any
) -> tuple[Summary, Session]:
    async def work() -> tuple[Summary, Session]:
        async with endpoint:
            asked = Asked(
                address=parse_address(f":{endpoint.port}"), stop=Stop(requests=12), salt="test"
            )
            session = Session(replace(asked, **more))
            try:
                await session.open()
                return await session.measure(workload), session
            finally:
                session.close()

    return asyncio.run(work())


def test_prompts_have_the_asked_length_by_the_endpoints_own_count() -> None:
    endpoint = FakeEndpoint()
    summary, session = measured(endpoint)
    assert [one.prompt_tokens for one in summary.records] == [100] * 12
    assert [one.tokens for one in summary.records] == [6] * 12
    assert session.target is not None
    assert (session.target.model, session.target.is_exact) == ("fake", True)
    assert summary.counted_by == {CountedBy.USAGE: 12}
    assert all(body["ignore_eos"] and body["stream"] for body in endpoint.bodies)


def test_counts_that_make_no_sense_are_refused_unless_prompts_are_given() -> None:
    def reply(body: dict[str, Any]) -> bytes:
        found = answered(body)
        usage = b'"prompt_tokens": ' + str(2 * words_of(body) + 12).encode()
        return changed(found, usage, b'"prompt_tokens": 9')

    with pytest.raises(ConfigError, match=r"counts 9 tokens .* expected more") as caught:
        measured(FakeEndpoint(reply))
    assert "--prompts" in caught.value.remedy
    prompts = [[{"role": "user", "content": f"Name {n} rivers."}] for n in range(30)]
    summary, _ = measured(FakeEndpoint(reply), prompts=prompts)
    assert len(summary.good) == 12


def test_warm_up_is_sent_and_not_measured_and_shares_no_prompt_with_the_run() -> None:
    endpoint = FakeEndpoint()
    summary, _ = measured(endpoint, warm_up=5)
    texts = [str(body["messages"]) for body in endpoint.bodies]
    assert len(summary.records) == 12
    assert endpoint.connections == 3  # never more at once than the run has clients
    assert len(texts) == len(set(texts)) == 3 + 5 + 12  # three questions about the endpoint itself


def test_prompts_of_a_file_go_on_where_warm_up_ended() -> None:
    """What warm-up sent is in the prefix cache: sent again, it would measure that."""
    endpoint = FakeEndpoint()
    prompts = [[{"role": "user", "content": f"prompt {n}"}] for n in range(17)]
    summary, _ = measured(endpoint, warm_up=5, prompts=prompts)
    sent = [body["messages"][0]["content"] for body in endpoint.bodies[1:]]  # after one question
    assert sorted(sent) == sorted(f"prompt {n}" for n in range(17))
    assert summary.notes == ()
    again, _ = measured(FakeEndpoint(), warm_up=5, prompts=prompts[:16])
    assert again.notes[0].startswith("17 requests with 16 prompts")


def test_the_other_api() -> None:
    summary, _ = measured(FakeEndpoint(), path="/v1/completions")
    assert [one.prompt_tokens for one in summary.records] == [100] * 12


def test_the_later_turn_of_a_session_has_what_was_said() -> None:
    endpoint = FakeEndpoint()
    workload = replace(
        WORKLOAD, turns=fixed(3), waits=Constant(0.0), arrivals=ClosedLoop(clients=1)
    )
    measured(endpoint, workload, stop=Stop(requests=3))
    first, _, third = endpoint.bodies[-3:]
    assert [m["role"] for m in third["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert third["messages"][0] == first["messages"][0]
    assert third["messages"][1]["content"] == " a" * 6


def only(*allowed: str) -> Callable[[dict[str, Any]], bytes]:
    """An endpoint that refuses what it does not know, as hosted ones do."""

    def reply(body: dict[str, Any]) -> bytes:
        unknown = body.keys() - {"model", "messages", "stream", *allowed}
        if unknown:
            return refusal("400 Bad Request", f"Unrecognized: {sorted(unknown)}")
        return answered(body, has_usage="stream_options" in body)

    return reply


@pytest.mark.parametrize(
    "allowed",
    [
        ("max_tokens", "temperature", "stream_options"),
        ("max_completion_tokens", "stream_options"),
        ("max_tokens",),
    ],
)
def test_fields_that_an_endpoint_refuses_are_left_out(allowed: tuple[str, ...]) -> None:
    endpoint = FakeEndpoint(only(*allowed))
    summary, session = measured(endpoint)
    assert len(summary.good) == 12
    assert session.target is not None
    assert not session.target.is_exact
    expected = CountedBy.USAGE if "stream_options" in allowed else CountedBy.CHUNKS
    assert summary.counted_by == {expected: 12}


def test_a_key_goes_with_every_request() -> None:
    endpoint = FakeEndpoint()
    measured(endpoint, key="secret")
    assert set(endpoint.keys) == {"Bearer secret"}


def test_failures_of_all_kinds_stand_apart() -> None:
    good = iter([True, True, True])  # the three questions before the run

    def reply(body: dict[str, Any]) -> bytes:
        if next(good, False):
            return answered(body)
        number = len(endpoint.bodies) % 6
        bad = event({"choices": [{"delta": {"content": "a"}}]}) + event({"error": "boom"})
        return (
            answered(body),
            refusal("429 Too Many Requests", "slow down"),
            refusal("500 Oops", "sorry"),
            response("200 OK", bad, "text/event-stream"),
            b"",
            response("200 OK", b"<html>", "text/html"),
        )[number]

    endpoint = FakeEndpoint(reply)
    summary, _ = measured(endpoint)
    assert summary.failures == {
        "rate limited (429)": 2, "HTTP 500": 2, "error in the stream": 2, "connection lost": 2,
        "did not stream": 2,
    }  # fmt: skip
    assert (len(summary.good), summary.output_tokens) == (2, 12)


def test_an_endpoint_that_dies_in_the_middle_leaves_what_was_measured() -> None:
    def reply(body: dict[str, Any]) -> bytes:
        return answered(body) if len(endpoint.bodies) <= 11 else b""

    endpoint = FakeEndpoint(reply)
    summary, _ = measured(endpoint, stop=Stop(requests=1000))
    assert len(summary.good) == 8
    assert len(summary.records) < 40
    assert summary.notes[0].startswith("ended early: 20 requests in a row failed")


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        (FakeEndpoint(models=response("404 No", b"<html>", "text/html")), "without a model"),
        (FakeEndpoint(models=refusal("401 No", "bad key")), "refuses the key"),
        (FakeEndpoint(models=response("302 F", b"", more="Location: x\r\n")), "redirects to 'x'"),
        (FakeEndpoint(lambda body: refusal("404 No", "no such model")), "no such model"),
        (FakeEndpoint(lambda body: refusal("400 No", "nothing works")), "nothing works"),
        (FakeEndpoint(lambda body: response("200 OK", b"{}")), "did not stream"),
        (FakeEndpoint(lambda body: b""), "connection lost"),
    ],
)
def test_an_endpoint_that_is_of_no_use_is_one_line(endpoint: FakeEndpoint, said: str) -> None:
    with pytest.raises(Unreachable, match=said) as found:
        measured(endpoint)
    assert "\n" not in found.value.cause
    assert found.value.remedy


def test_nobody_listens() -> None:
    async def work() -> None:
        async with FakeEndpoint() as endpoint:
            port = endpoint.port
        await Session(Asked(address=parse_address(f":{port}"))).open()

    with pytest.raises(Unreachable, match="can't be reached"):
        asyncio.run(work())


def test_an_interrupted_run_sends_nothing_more() -> None:
    async def work() -> tuple[Summary, int]:
        async with FakeEndpoint() as endpoint:
            session = Session(Asked(address=parse_address(f":{endpoint.port}"), warm_up=4))
            await session.open()
            await session.measure(WORKLOAD, Stop(requests=1))
            sent = len(endpoint.bodies)
            session.interrupt()  # as in the middle of a sweep
            summary = await session.measure(WORKLOAD, Stop(requests=12))
            session.close()
            return summary, len(endpoint.bodies) - sent

    summary, sent = asyncio.run(work())
    assert (len(summary.records), sent) == (0, 0)
    assert summary.notes == ("ended early: it was interrupted",)


def test_the_second_interrupt_gives_up_what_is_on_its_way_and_keeps_the_rest() -> None:
    """An endpoint that hangs: waiting for its answers would take as long as the timeout."""
    sessions: list[Session] = []

    def reply(body: dict[str, Any]) -> bytes | None:
        if len(endpoint.bodies) < 3 + 8:  # three questions before the run
            return answered(body)
        if len(endpoint.bodies) == 3 + 8 + 2:  # three clients wait
            sessions[0].interrupt()
            sessions[0].interrupt()
        return None

    async def work() -> Summary:
        async with endpoint:
            session = Session(Asked(address=parse_address(f":{endpoint.port}")))
            sessions.append(session)
            await session.open()
            summary = await session.measure(WORKLOAD, Stop(requests=100))
            session.close()
            return summary

    endpoint = FakeEndpoint(reply)
    summary = asyncio.run(work())
    assert (len(summary.good), len(summary.records), summary.failures) == (7, 7, {})
    assert summary.notes == (
        "ended early: it was interrupted",
        "3 requests on their way were cut off and are left out",
    )
    with pytest.raises(KeyboardInterrupt):  # the third time everything ends
        sessions[0].interrupt()


def test_signals_mean_afterwards_what_they_meant_before() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        session = Session(Asked(address=parse_address(":1")))

        async def work() -> bool:
            return signal.getsignal(signal.SIGTERM) is not mine

        assert run_session(session, work)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_before_anything_was_measured_an_interrupt_ends_everything() -> None:
    with pytest.raises(KeyboardInterrupt):
        Session(Asked(address=parse_address(":1"))).interrupt()


def test_an_endpoint_that_is_gone_is_found_out_before_the_next_run() -> None:
    """Connections that were kept are closed by then: they are not taken for open ones."""

    async def work() -> None:
        async with FakeEndpoint() as endpoint:
            session = Session(Asked(address=parse_address(f":{endpoint.port}")))
            await session.open()
            await session.measure(WORKLOAD, Stop(requests=6))
            await endpoint.die()
        with pytest.raises(Unreachable, match="can't be reached"):
            await session.check()
        with pytest.raises(Unreachable, match="can't be reached"):
            await session.measure(WORKLOAD, Stop(requests=6))

    asyncio.run(work())


def test_clocks_that_disagree_change_nothing() -> None:
    """Latencies come from one clock that no one sets: what an endpoint says about time is not
    read. A client that subtracts `created` from its own time has TTFT in decades."""

    def reply(body: dict[str, Any]) -> bytes:
        return changed(answered(body), b'{"choices"', b'{"created": 1, "choices"')

    summary, _ = measured(FakeEndpoint(reply))
    assert all(0 <= one.ttft_s <= one.e2e_s <= summary.wall_s for one in summary.records)


def test_questions_before_the_run_are_paid_for_too() -> None:
    purse = Purse(parse_api("mine=1/0"), 1.0)
    summary, _ = measured(FakeEndpoint(), purse=purse)
    run = sum(one.prompt_tokens for one in summary.records)
    questions = (2 * 24 + 12) + (2 * 216 + 12) + (2 * 216 + 12)  # words and the fake template
    assert purse.spent_usd * 1e6 == pytest.approx(run + questions, rel=0.02)


@pytest.mark.parametrize("is_silent", [True, False])
def test_tls_with_a_server_that_speaks_none_is_one_line(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.client.connection._HANDSHAKE_S", 0.05)

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not is_silent:
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()
        finally:
            writer.close()

    async def work() -> None:
        server = await asyncio.start_server(plain, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await Session(Asked(address=parse_address(f"https://127.0.0.1:{port}"))).open()
        finally:
            server.close()

    with pytest.raises(Unreachable, match=r"TLS with 127\.0\.0\.1 failed") as found:
        asyncio.run(work())
    assert "\n" not in found.value.cause
