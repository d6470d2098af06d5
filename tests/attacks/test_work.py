"""Requests that cost more than they should, end to end on a real server: rows 1 to 4 of issue 13.

Each is refused, or ends with its own error; the engine lives, `/health` answers, and an honest
client's seeded answer is the same beside it. Timing never decides: only what does not come at all
within a long time fails.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

import attack_wire
import attacks_work
import fuzz_grammars
from attack_probe import essence, question
from attacked_server import AttackedServer
from attacks_work import Act, Outcome, Target, chat
from fuzz_bodies import CHAT, COMPLETIONS, EMBEDDINGS

PATIENCE_S = 100.0
IDLE_S = 60.0  # until what was refused has stopped computing
GROWN_BYTES = 400 << 20  # a copy of a body or two, and what an allocator keeps; not gigabytes

Questions = dict[str, Any]


async def _ask_honest(port: int) -> Questions:
    found = {}
    for name in ("sampled", "fresh"):
        while True:
            path, body = question(name)
            answer = await attack_wire.ask(port, path, body, limit_s=PATIENCE_S)
            if answer.status != 503 or "retry-after" not in answer.headers:
                break
            await asyncio.sleep(float(answer.headers["retry-after"]))
        assert answer.status == 200, (name, answer.body)
        found[name] = essence(answer.json())
    return found


def attack(server: AttackedServer, act: Act) -> Outcome:
    """The attack beside honest clients; what the attacker got."""
    target = Target(server, Outcome(), PATIENCE_S)

    async def both() -> None:
        before = await _ask_honest(server.port)
        attacking = asyncio.ensure_future(act(target))
        await asyncio.sleep(0.3)
        assert await attack_wire.health(server.port) == 200
        assert await _ask_honest(server.port) == before
        async with asyncio.timeout(PATIENCE_S):
            await attacking
        assert await attack_wire.health(server.port) == 200

    asyncio.run(both())
    assert server.restarts() == 0, server.log_tail()
    assert server.wait_free(30) == 0
    assert server.log_errors() == []
    return target.outcome


def _becomes_idle(server: AttackedServer) -> bool:
    """Whether its processes stop computing: half a second of work in two is not much."""
    end_s = time.monotonic() + IDLE_S
    while time.monotonic() < end_s:
        before_s = server.cpu_s()
        time.sleep(2)
        if server.cpu_s() - before_s < 0.5:
            return True
    return False


def _refusal(server: AttackedServer, path: str, body: Any) -> dict[str, Any]:
    """The error that this is refused with, beside honest clients."""
    answers: list[attack_wire.Answer] = []

    async def act(target: Target) -> None:
        answers.append(await attack_wire.ask(target.port, path, body, limit_s=PATIENCE_S))

    attack(server, act)
    assert answers[0].status == 400, answers[0].body[:300]
    error: dict[str, Any] = answers[0].json()["error"]
    return error


# -- row 1 -----------------------------------------------------------------------------------------

HEAVY_GRAMMARS: dict[str, dict[str, Any]] = {
    "patterns": {"guided_json": attacks_work.schema_patterns()},
    "intersections": {"guided_grammar": fuzz_grammars.intersections(200)},
    "properties": {"guided_json": attacks_work.pattern_properties()},
}


@pytest.mark.parametrize("kind", HEAVY_GRAMMARS)
def test_a_heavy_grammar_is_given_up_and_leaves_nothing(
    attacked: AttackedServer, kind: str
) -> None:
    before = attacked.held()
    body = chat(**HEAVY_GRAMMARS[kind])
    outcome = attack(attacked, attacks_work.one(CHAT, lambda: body, 2))
    assert set(outcome.statuses) <= {"400", "503"}
    assert _becomes_idle(attacked)
    assert attacked.held().bytes < before.bytes + GROWN_BYTES


# -- row 2 -----------------------------------------------------------------------------------------


def test_an_ambiguous_grammar_costs_its_own_request(attacked: AttackedServer) -> None:
    outcome = attack(attacked, lambda target: attacks_work.ambiguous(target, tokens=100))
    assert not set(outcome.statuses) - {"200", "400"}, outcome.statuses


# -- rows 3 and 4 ----------------------------------------------------------------------------------

TOO_MUCH: dict[str, tuple[str, Callable[[], Any]]] = {
    "allowed_token_ids": (CHAT, lambda: chat(allowed_token_ids=[5] * 4_000_000, n=16)),
    "stop_token_ids": (CHAT, lambda: chat(stop_token_ids=[5] * 4_000_000)),
    "logit_bias": (CHAT, lambda: chat(logit_bias={str(n): 1 for n in range(600_000)})),
    "stop": (CHAT, lambda: chat(stop=["a" * 500_000] * 16)),
    "bad_words": (CHAT, lambda: chat(bad_words=["b" * 120_000] * 64)),
    "input": (EMBEDDINGS, lambda: {"input": attacks_work.texts()}),
}


@pytest.mark.parametrize("field", TOO_MUCH)
def test_too_much_of_a_list_is_refused_by_its_name(attacked: AttackedServer, field: str) -> None:
    before = attacked.held()
    path, make = TOO_MUCH[field]
    body = json.dumps(make(), separators=(",", ":")).encode()
    assert str(_refusal(attacked, path, body)["param"]).startswith(field)
    assert attacked.held().bytes < before.bytes + GROWN_BYTES


def test_long_bad_words_do_not_slow_others_down_for_ever(attacked: AttackedServer) -> None:
    body = chat(bad_words=["a b " * 100] * 64, n=16) | {"max_tokens": 20}
    outcome = attack(attacked, attacks_work.one(CHAT, lambda: body))
    assert not set(outcome.statuses) - {"200", "400"}, outcome.statuses


def test_echo_with_logprobs_and_many_answers(attacked: AttackedServer) -> None:
    body = {"prompt": [57] * 1500, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1}
    outcome = attack(attacked, attacks_work.one(COMPLETIONS, lambda: body))
    assert not set(outcome.statuses) - {"200", "400"}, outcome.statuses
