"""Attacks from beside the requests: connections, bodies that do not end, descriptors, other
tenants' secrets and shares, what lies in the current folder (rows 5 to 11 of the table in
benchmarks/README.md).

Knows what to send; how the harm is measured is attacks.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import attack_wire
from attack_wire import Wire
from attacks_work import Attack, Target, chat, pattern_properties
from fuzz_bodies import CHAT, COMPLETIONS, EMBEDDINGS

KEYS = """
[[keys]]
name = "attacker"
key = "attacker"

[[keys]]
name = "honest"
key = "honest"
"""
LIMITED_KEYS = KEYS.replace(
    'key = "attacker"\n', 'key = "attacker"\nmax_concurrent = 2\ntokens_per_minute = 1000\n'
)
PLANTED = "ran.txt"  # written by the planted module
BODY_BYTES = 8 << 20


@contextlib.asynccontextmanager
async def connections(target: Target, count: int, said: bytes) -> AsyncIterator[list[Wire]]:
    """So many, as far as they can be had; each has said this."""
    wires: list[Wire] = []

    async def open_one() -> None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(10):
                wires.append(await Wire.open(target.port))
                wires[-1].send(said)

    try:
        for first in range(0, count, 100):  # at once: the first shall not be late before the last
            await asyncio.gather(*(open_one() for _ in range(min(100, count - first))))
        target.outcome.note = f"{len(wires)} of {count} connections"
        yield wires
    finally:
        for wire in wires:
            wire.abort()


# A body that is waited for: such a connection is not idle, and has no reason to go.
BUSY = attack_wire.make_head("POST", CHAT, [], 100)


def restart_among(count: int, most_descriptors: int | None = None) -> Attack:
    """The engine dies while so many connections are open."""

    async def act(target: Target) -> None:
        async with connections(target, count, BUSY):
            await asyncio.sleep(2)
            # Newcomers take the low descriptors that the engine leaves, whether there is room for
            # them or not: what is left for the next engine are high ones, or none.
            coming = asyncio.ensure_future(_keep_coming(target))
            target.server.kill_engine()
            back = await asyncio.to_thread(_is_back, target, target.bound_s - 15)
            coming.cancel()
            await asyncio.wait({coming})
            target.outcome.succeeded = not back
            target.outcome.note += "; it came back" if back else "; it stayed down"
            if not target.server.is_alive:
                target.outcome.note += f", exit {target.server.process.returncode}"

    return Attack(
        name=f"restart-{count}",
        row="5",
        what=f"the engine killed among {count} connections"
        + (f", {most_descriptors} descriptors" if most_descriptors else ""),
        act=act,
        most_descriptors=most_descriptors,
    )


async def _keep_coming(target: Target) -> None:
    wires: list[Wire] = []
    try:
        while True:
            with contextlib.suppress(OSError):
                wires.append(await Wire.open(target.port))
            if len(wires) > 200:
                wires.pop(0).abort()
            await asyncio.sleep(0.001)
    finally:
        for wire in wires:
            wire.abort()


def _is_back(target: Target, limit_s: float) -> bool:
    """There may be no connection left to ask by: the log says it."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s and target.server.is_alive:
        if '"event": "engine_back"' in target.server.log_text():
            return True
        time.sleep(0.2)
    return False


async def _oracle(target: Target) -> None:
    """Does a count move when another key has sent the same text, and only then?"""
    secret = " ".join(secrets.token_hex(4) for _ in range(60))
    other = " ".join(secrets.token_hex(4) for _ in range(60))
    victim = ("authorization", "Bearer honest")
    body = {"max_tokens": 1, "prompt": secret}
    await attack_wire.ask(target.port, COMPLETIONS, body, victim)
    moved = []
    for guess in (other, secret):
        before = _misses(target)
        await target.ask(COMPLETIONS, {"max_tokens": 1, "prompt": guess})
        await asyncio.sleep(1.5)  # counts come with the engine's heartbeat
        after = _misses(target)
        moved.append({name: after[name] - before.get(name, 0) for name in after})
    target.outcome.succeeded = moved[0] != moved[1]
    target.outcome.note = f"misses moved by {moved[0]} for a wrong guess, {moved[1]} for the right"
    if not moved[0] and not moved[1]:
        target.outcome.note = "the attacker's key can't read the counts"


def _misses(target: Target) -> dict[str, float]:
    with contextlib.suppress(OSError):
        text = target.server.get("/metrics", key=target.key)
        pattern = r'^headrace:prefix_cache_misses_total\{.*?reason="(\w+)".*\} (\S+)$'
        found = {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}
        found.pop("too_short", None)  # other clients' short prompts move it all the time
        return found
    return {}


async def _planted(target: Target) -> None:
    folder = target.server.working_folder
    assert folder is not None
    target.outcome.succeeded = (folder / PLANTED).exists()
    target.outcome.note = "it ran" if target.outcome.succeeded else "it did not run"


async def _silent(target: Target) -> None:
    async with connections(target, 2000, b""):
        await asyncio.sleep(40)


async def _unfinished_bodies(target: Target) -> None:
    head = attack_wire.make_head("POST", CHAT, [], BODY_BYTES)
    async with connections(target, 200, head) as wires:
        await asyncio.gather(*(send_most(wire) for wire in wires))
        await asyncio.sleep(target.bound_s / 2)
        for wire in wires:
            if wire.reader.at_eof():
                target.outcome.statuses["closed"] += 1
            elif found := bytes(getattr(wire.reader, "_buffer", b""))[9:12].decode("latin-1"):
                target.outcome.statuses[found] += 1
            else:
                target.outcome.statuses["held"] += 1


async def send_most(wire: Wire) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(30):
            for _ in range(BODY_BYTES // 65536 - 1):
                wire.send(b" " * 65536)
                await wire.drain()


FAN_OUT: dict[str, Any] = {
    "prompt": [f"Tell me of mill {place}" for place in range(128)],
    "n": 16,
    "max_tokens": 2000,
    "ignore_eos": True,
}


async def _fan_out(target: Target) -> None:
    async with asyncio.timeout(target.bound_s):
        await target.ask_together(COMPLETIONS, [FAN_OUT, FAN_OUT])


# -- row 11 ----------------------------------------------------------------------------------------


async def _say(target: Target, data: bytes, *, half_close: bool = False) -> str:
    """What comes back to these bytes: a status, or that nothing does."""
    wire = await Wire.open(target.port)
    try:
        async with asyncio.timeout(20):
            wire.send(data)
            if half_close:
                wire.half_close()
            answer = await wire.answer("POST")
            target.outcome.count(answer)
            shaped = b'"message"' in answer.body
            return f"{answer.status}{'' if shaped or answer.status < 400 else ', plain'}"
    except (OSError, asyncio.IncompleteReadError):
        target.outcome.statuses["nothing"] += 1
        return "nothing"
    finally:
        wire.abort()


async def _digits(target: Target) -> None:
    length = b"0" * 5000 + b"2"  # a number that fits, in more digits than Python reads
    head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %b\r\n\r\n{}" % length
    said = await _say(target, head)
    target.outcome.succeeded, target.outcome.note = "500" in said, said


async def _two_hosts(target: Target) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n"
    said = await _say(target, head)
    target.outcome.succeeded, target.outcome.note = said.startswith("200"), said


async def _half_closed(target: Target) -> None:
    said = await _say(target, attack_wire.post(CHAT, chat(max_tokens=1)), half_close=True)
    target.outcome.succeeded, target.outcome.note = said == "nothing", said


async def _late_compile(target: Target) -> None:
    """What its time ends is a 503; what the compiler gives up is a 400."""
    began_s = time.monotonic()
    answer = await target.ask(CHAT, chat(guided_json=pattern_properties(5000), timeout_s=1))
    status = 0 if answer is None else answer.status
    target.outcome.succeeded = status != 503
    took_s = time.monotonic() - began_s
    target.outcome.note = f"timeout_s was 1: {status} after {took_s:.1f} s"


async def _late_embeddings(target: Target) -> None:
    texts = [f"{place} " + "mill " * 400 for place in range(100)]
    began_s = time.monotonic()
    answer = await target.ask(EMBEDDINGS, {"input": texts, "timeout_s": 1})
    took_s = time.monotonic() - began_s
    status = "nothing" if answer is None else answer.status
    target.outcome.succeeded = took_s > 3  # a second, and what a busy machine makes of it
    target.outcome.note = f"timeout_s was 1: {status} after {took_s:.1f} s"


async def _secret_fields(target: Target) -> None:
    await target.ask(CHAT, chat(max_tokens=1, my_password_is_hunter2=1))
    await asyncio.sleep(0.5)
    target.outcome.succeeded = "hunter2" in target.server.log_text()
    target.outcome.note = "in the log" if target.outcome.succeeded else "not in the log"


async def _environment(target: Target) -> None:
    target.outcome.succeeded = "HEADRACE_API_KEY" in target.server.engine_environment()
    target.outcome.note = "the engine has it" if target.outcome.succeeded else "not there"


EDGE = (
    restart_among(1015),
    restart_among(300, most_descriptors=256),
    Attack(
        name="salt-oracle",
        row="6",
        what="miss reasons as an oracle for another key's text",
        act=_oracle,
        keys=KEYS,
    ),
    Attack(
        name="planted-module",
        row="7",
        what="a msgspec.py in the current folder",
        act=_planted,
        planted=True,
    ),
    Attack(name="silent-connections", row="8", what="2,000 that send nothing", act=_silent),
    Attack(
        name="unfinished-bodies",
        row="9",
        what="200 unfinished bodies of 8 MB",
        act=_unfinished_bodies,
        after_s=30,
    ),
    Attack(
        name="fan-out",
        row="10",
        what="2 requests of 128 prompts x n=16 x 2,000 tokens under a key's limits",
        act=_fan_out,
        keys=LIMITED_KEYS,
    ),
    Attack(name="length-digits", row="11", what="Content-Length of 5,001 digits", act=_digits),
    Attack(name="two-hosts", row="11", what="two Host headers", act=_two_hosts),
    Attack(name="half-closed", row="11", what="a client that half-closes", act=_half_closed),
    Attack(name="late-compile", row="11", what="timeout_s while compiling", act=_late_compile),
    Attack(name="late-embeddings", row="11", what="timeout_s of embeddings", act=_late_embeddings),
    Attack(name="log-fields", row="11", what="unknown field names in the log", act=_secret_fields),
    Attack(
        name="key-in-environment",
        row="11",
        what="HEADRACE_API_KEY in the engine's environment",
        act=_environment,
        environment=(("HEADRACE_API_KEY", "honest"),),
    ),
)
