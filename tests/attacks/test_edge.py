"""Connections, bodies, descriptors and other tenants, end to end on a real server: rows 5 to 11 of
issue 13. Timing never decides: only what does not come at all within a long time fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.attacks.conftest import StartAttacked

import attack_wire
import attacks
import attacks_edge
from attack_probe import HONEST
from attacked_server import AttackedServer
from attacks_work import Attack, Outcome, Target

PATIENCE_S = 60.0
FAIR_TOKENS = 2500  # 64 sequences, for the steps of one answer, a prompt, and turns between
BODIES_BYTES = 900 << 20  # of 1.6 GB that are sent


def act(server: AttackedServer, attack: Attack, key: str | None = None) -> Outcome:
    target = Target(server, Outcome(), PATIENCE_S, key)
    asyncio.run(attack.act(target))
    return target.outcome


def named(name: str) -> Attack:
    return attacks.ATTACKS[name]


def start_with_keys(start: StartAttacked, folder: Path, keys: str) -> AttackedServer:
    path = folder / "keys.toml"
    path.write_text(keys)
    path.chmod(0o600)
    return start(("--api-keys-file", str(path)))


@pytest.mark.parametrize("name", ["restart-1015", "restart-300"])
def test_the_engine_comes_back_among_many_connections(
    start_attacked: StartAttacked, name: str
) -> None:
    attack = named(name)
    server = start_attacked(most_descriptors=attack.most_descriptors)
    outcome = act(server, attack)
    assert outcome.succeeded is False, outcome.note
    path, body = HONEST["greedy"]
    answer = asyncio.run(attack_wire.ask(server.port, path, body))
    assert answer.status == 200


def test_no_count_tells_of_another_keys_text(start_attacked: StartAttacked, tmp_path: Path) -> None:
    server = start_with_keys(start_attacked, tmp_path, attacks_edge.KEYS)
    outcome = act(server, named("salt-oracle"), "attacker")
    assert outcome.succeeded is False, outcome.note


def test_what_lies_in_the_current_folder_is_not_imported(
    start_attacked: StartAttacked, tmp_path: Path
) -> None:
    (tmp_path / "msgspec.py").write_text(attacks.PLANTED_MODULE)
    server = start_attacked(working_folder=tmp_path)
    assert act(server, named("planted-module")).succeeded is False


def test_probes_are_answered_beside_silent_connections(attacked: AttackedServer) -> None:
    async def probe() -> None:
        target = Target(attacked, Outcome(), PATIENCE_S)
        async with attacks_edge.connections(target, 2000, b""):
            for _ in range(20):
                assert await attack_wire.health(attacked.port) == 200
                await asyncio.sleep(0.1)

    asyncio.run(probe())


def test_unfinished_bodies_share_a_bound(attacked: AttackedServer) -> None:
    before = attacked.held()

    async def fill() -> int:
        target = Target(attacked, Outcome(), PATIENCE_S)
        head = attack_wire.make_head("POST", "/v1/chat/completions", [], attacks_edge.BODY_BYTES)
        async with attacks_edge.connections(target, 200, head) as wires:
            await asyncio.gather(*(attacks_edge.send_most(wire) for wire in wires))
            return attacked.held().bytes

    assert asyncio.run(fill()) < before.bytes + BODIES_BYTES
    # And it is given back.
    end_s = time.monotonic() + PATIENCE_S
    while attacked.held().bytes > before.bytes + (300 << 20) and time.monotonic() < end_s:
        time.sleep(0.5)
    assert attacked.held().bytes < before.bytes + (300 << 20)


def test_a_keys_fan_out_costs_that_key(start_attacked: StartAttacked, tmp_path: Path) -> None:
    server = start_with_keys(start_attacked, tmp_path, attacks_edge.LIMITED_KEYS)
    came = 0  # tokens to the attacker

    async def fan_out() -> None:
        nonlocal came
        wire = await attack_wire.Wire.open(server.port)
        body = {**attacks_edge.FAN_OUT, "stream": True}
        key = ("authorization", "Bearer attacker")
        try:
            wire.send(attack_wire.post("/v1/completions", body, key))
            while data := await wire.reader.read(1 << 16):
                came += data.count(b"data: ")
        finally:
            wire.abort()

    async def both() -> list[int]:
        attacking = [asyncio.ensure_future(fan_out()) for _ in range(2)]
        await asyncio.sleep(3)
        found = []
        for name in ("greedy", "sampled", "vector"):
            path, body = HONEST[name]
            before, key = came, ("authorization", "Bearer honest")
            answer = await attack_wire.ask(server.port, path, body, key, limit_s=PATIENCE_S)
            assert answer.status == 200
            found.append(came - before)
        for task in attacking:
            task.cancel()
        await asyncio.wait(attacking)
        return found

    # Steps rather than seconds: twelve tokens are not to wait for thousands of another's.
    assert max(asyncio.run(both())) < FAIR_TOKENS


@pytest.mark.parametrize(
    "name",
    ["length-digits", "two-hosts", "half-closed", "late-compile", "log-fields"],
)
def test_a_small_one(attacked: AttackedServer, name: str) -> None:
    outcome = act(attacked, named(name))
    assert outcome.succeeded is False, outcome.note


def test_the_engine_does_not_have_the_key(start_attacked: StartAttacked) -> None:
    server = start_attacked(environment={"HEADRACE_API_KEY": "honest"})
    assert act(server, named("key-in-environment"), "honest").succeeded is False
