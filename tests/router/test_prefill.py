"""Replicas that compute prompts for others: who is chosen, what the others are told, and that their
absence changes nothing but the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.router import fakes
from tests.router.fakes import FakeReplica, Rig, ask, get, plain, rig
from typer.testing import CliRunner

from headrace.cli.commands import app
from headrace.client.connection import parse_address
from headrace.core.errors import ConfigError
from headrace.router.prefill import Prefills

LONG = {"prompt": "x" * 4000}
HEADER = "x-headrace-prefill"


def handover(role: str, port: int | None = None, **more: Any) -> dict[str, Any]:
    host = "127.0.0.1" if port else None
    return {"role": role, "host": host, "port": port, "fingerprint": "kv-1", **more}


@dataclass(eq=False)
class Apart(FakeReplica):
    fingerprint: str | None = "hr-1"
    told: dict[str, Any] | None = field(default_factory=lambda: handover("decode"))

    def _about(self, path: str) -> bytes:
        if path == "/handover":
            return plain(404, {}) if self.told is None else plain(200, self.told)
        return super()._about(path)


def giver(name: str, port: int, **more: Any) -> Apart:
    return Apart(name, told=handover("prefill", port, **more))


Body = Callable[[Rig, Prefills], Awaitable[None]]


def run(decoding: list[Apart], givers: list[Apart], body: Body) -> None:
    async def main() -> None:
        async with rig(*decoding, internal_key="k") as running:
            for each in givers:
                await each.start()
            prefills = Prefills(
                [parse_address(each.url) for each in givers], running.router.settings
            )
            running.router.prefills = prefills
            try:
                await prefills.start(running.fleet)
                await body(running, prefills)
            finally:
                prefills.stop()
                for each in givers:
                    each.kill()

    asyncio.run(main())


def test_a_long_prompt_goes_with_an_address_and_a_short_one_without() -> None:
    decoding, one = Apart("d"), giver("p", 4001)

    async def body(running: Rig, prefills: Prefills) -> None:
        (replica,) = prefills.fleet.replicas
        assert (await ask(running.port, LONG)).status == 200
        assert decoding.got[-1].header(HEADER) == "127.0.0.1:4001"
        assert decoding.got[-1].header("authorization") == "Bearer k"
        assert one.got == []  # the router sends it nothing
        # What a client says about it is dropped, for long prompts and short ones.
        await ask(running.port, LONG, headers={HEADER: "10.0.0.1:22"})
        assert decoding.got[-1].header(HEADER) == "127.0.0.1:4001"
        await ask(running.port, {"prompt": "short"}, headers={HEADER: "10.0.0.1:22"})
        assert decoding.got[-1].header(HEADER) == ""
        await running.settle()
        assert (replica.pending_tokens, replica.running) == (0, 0)
        text = (await get(running.port, "/metrics")).body.decode()
        assert f'headrace_router_prefill_requests_total{{replica="{one.url}"}} 2\n' in text
        assert 'headrace_router_prefill_left_total{reason="short"} 1\n' in text
        shown = (await get(running.port, "/replicas")).json["replicas"]
        assert [(each["url"], each["version"]) for each in shown] == [
            (decoding.url, ""),
            (one.url, "prefill"),
        ]

    run([decoding], [one], body)


def test_pending_prompts_are_counted_until_the_answer_begins() -> None:
    decoding, one, two = Apart("d", behave=fakes.hang), giver("p", 4001), giver("q", 4002)

    async def body(running: Rig, prefills: Prefills) -> None:
        by_url = {replica.url: replica for replica in prefills.fleet.replicas}
        others = {"prompt": "y" * 4000}
        tasks = [asyncio.create_task(ask(running.port, body)) for body in (LONG, others)]
        while len(decoding.got) < 2:
            await asyncio.sleep(0.005)
        tokens = sorted(replica.pending_tokens for replica in by_url.values())
        assert min(tokens) >= 1000
        for task in tasks:
            task.cancel()  # clients that leave
        while any(replica.pending_tokens for replica in by_url.values()):
            await asyncio.sleep(0.005)

    run([decoding], [one, two], body)


def test_without_a_replica_for_prompts_the_others_compute_them() -> None:
    decoding, one = Apart("d"), giver("p", 4001)

    async def body(running: Rig, prefills: Prefills) -> None:
        one.kill()
        await prefills.heart.first()  # the next heartbeat
        assert (await ask(running.port, LONG)).status == 200
        assert decoding.got[-1].header(HEADER) == ""
        assert prefills.left["none"] == 1

    run([decoding], [one], body)


def test_an_engine_that_was_restarted_has_another_port() -> None:
    decoding, one = Apart("d"), giver("p", 4001)

    async def body(running: Rig, prefills: Prefills) -> None:
        one.told = handover("prefill", 4777)
        await prefills.heart.first()
        await ask(running.port, LONG)
        assert decoding.got[-1].header(HEADER) == "127.0.0.1:4777"
        one.told = handover("prefill", 4778, host="0.0.0.0")  # on all addresses: that of its URL
        await prefills.heart.first()
        await ask(running.port, LONG)
        assert decoding.got[-1].header(HEADER) == "127.0.0.1:4778"
        one.told = handover("both")
        await prefills.heart.first()
        await ask(running.port, LONG)
        assert decoding.got[-1].header(HEADER) == ""
        (replica,) = prefills.fleet.replicas
        assert "expected --role prefill" in replica.kept_out

    run([decoding], [one], body)


@pytest.mark.parametrize(
    ("decoding", "givers", "why"),
    [
        (Apart("d"), [Apart("p", told=handover("both"))], "can't compute prompts for others"),
        (Apart("d"), [Apart("p", told=None)], "can't compute prompts for others"),
        (Apart("d", told=handover("both")), [giver("p", 1)], "has the role 'both'"),
        (Apart("d", told=None), [giver("p", 1)], "can't fetch blocks"),
        (Apart("d"), [giver("p", 1, fingerprint="kv-2")], "computes blocks of kv-2"),
        (Apart("d"), [giver("p", 1), Apart("q", fingerprint="hr-2")], "serves m .hr-2."),
    ],
)
def test_pools_that_do_not_match(decoding: Apart, givers: list[Apart], why: str) -> None:
    async def body(running: Rig, prefills: Prefills) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=why):
        run([decoding], givers, body)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["http://a:1", "--prefill", "http://b:1"], "without --internal-key-variable"),
        (
            ["http://a:1", "--prefill", "ftp://b", *(key := ["--internal-key-variable", "PATH"])],
            "not a",
        ),
        (["http://a:1", "--prefill", "http://a:1", *key], "given twice"),
        (["http://a:1", "--prefill", "dns:b", *key], "expected dns:NAME:PORT"),
        (
            [
                "--version",
                "a=http://a:1:1",
                "--version",
                "b=http://b:1:1",
                "--prefill",
                "http://c:1",
                *key,
            ],
            "several versions",
        ),
    ],
)
def test_flags_that_can_not_work(words: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["route", *words])
    assert done.exit_code == 2
    assert why in " ".join(done.output.split())
    assert "try:" in done.output
