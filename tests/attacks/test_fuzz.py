"""Half a minute of the fuzzer of whole requests (benchmarks/fuzz_requests.py), and that it is a
function of its seed. HEADRACE_TEST_FUZZ_S sets how long; `make fuzz` runs for hours."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.conftest import StartAttacked

import fuzz_checks
from attack_wire import Answer
from fuzz_bodies import CHAT, MESSAGES, RESPONSES
from fuzz_cases import Case, Cases
from fuzz_requests import FLAGS, Plan, fuzz
from headrace.server.api.openapi import describe
from headrace.server.api.routes import all_routes
from headrace.server.request.call import encode_json

FUZZ_S = float(os.environ.get("HEADRACE_TEST_FUZZ_S", "30"))
GROWN_BYTES = 150 << 20  # generous: an allocator keeps what a large body needed

description: dict[str, Any] = json.loads(encode_json(describe(all_routes())))


@pytest.mark.timeout(300 + 5 * FUZZ_S)
def test_half_a_minute_of_requests(start_attacked: StartAttacked, tmp_path: Path) -> None:
    """The same cases every time for a third of it; then others, whose seed is printed."""
    server = start_attacked(FLAGS)
    found: dict[str, Any] = {}
    for seed, seconds in ((1, FUZZ_S / 3), (random.randrange(2, 2**31), FUZZ_S / 2)):
        plan = Plan(
            seed=seed,
            seconds=seconds,
            warm_count=2000 if seed == 1 else 0,
            warm_seconds=FUZZ_S / 6,
            concurrency=16,
            grown_bytes=GROWN_BYTES,
        )
        run, report = fuzz(server, plan, tmp_path)
        print(json.dumps(report))
        assert report["sent"] > 0
        found |= run.findings
    assert not found, found


def test_a_case_is_a_function_of_seed_and_number() -> None:
    one, other = Cases(7, description), Cases(7, description)
    for number in (*range(300), 10**9):
        # In another order, too: what was made before changes nothing.
        assert one.make(number).data == other.make(number).data
    assert all(one.make(n).data == Cases(7, description).make(n).data for n in range(299, 0, -37))
    assert one.make(5).data != Cases(8, description).make(5).data


def test_every_endpoint_and_every_manner_comes_up() -> None:
    cases = [Cases(3, description).make(number) for number in range(4000)]
    posts = {path for path, operations in description["paths"].items() if "post" in operations}
    assert posts - {"/ping"} <= {case.path for case in cases}
    families = Counter(case.family for case in cases)
    assert families.keys() == {
        *("good", "field", "text", "headers", "look", "not http", "leaves", "cut", "slow"),
        *("half-closes", "pipelined", "chunked", "unfinished", "broken chunks"),
    }
    assert all(len(case.data) < 40 << 20 for case in cases)


def answer(status: int, body: Any, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {"content-type": "application/json", "x-request-id": "a"}
    return Answer(status, {**kind, **headers}, data)


ERROR = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
ANTHROPIC = {"type": "error", "error": {"message": "m", "type": "t"}, "request_id": "a"}
STREAM = {"content-type": "text/event-stream"}


@pytest.mark.parametrize(
    ("path", "said", "is_good"),
    [
        (CHAT, answer(400, ERROR), True),
        (CHAT, answer(500, ERROR), False),
        (CHAT, answer(503, ERROR), False),
        (CHAT, answer(503, ERROR, **{"retry-after": "1"}), True),
        (CHAT, answer(400, ANTHROPIC), False),
        (MESSAGES, answer(400, ANTHROPIC), True),
        (MESSAGES, answer(400, ERROR), False),
        (CHAT, answer(400, b"oh"), False),
        (CHAT, answer(400, {"error": {**ERROR["error"], "message": ""}}), False),
        (CHAT, answer(200, b'data: {"a":1}\n\ndata: [DONE]\n\n', **STREAM), True),
        (CHAT, answer(200, b'data: {"a":1}\n\n', **STREAM), False),
        (CHAT, answer(200, b'data: {"error":{"status":503}}\n\n', **STREAM), True),
        (CHAT, answer(200, b'data: {"error":{"status":500}}\n\n', **STREAM), False),
        (CHAT, answer(200, b"data: [DONE]", **STREAM), False),
        (RESPONSES, answer(200, b"event: response.completed\ndata: {}\n\n", **STREAM), True),
        (RESPONSES, answer(200, b"event: response.created\ndata: {}\n\n", **STREAM), False),
        (MESSAGES, answer(200, b"event: message_stop\ndata: {}\n\n", **STREAM), True),
        (MESSAGES, answer(200, b"event: ping\ndata: {}\n\n", **STREAM), False),
        (CHAT, answer(200, {"choices": [{"finish_reason": "stop"}]}), True),
        (CHAT, answer(200, {"choices": [{"finish_reason": "eos"}]}), False),
        (CHAT, answer(200, {"choices": []}), False),
    ],
)
def test_what_is_wrong_with_an_answer_is_seen(path: str, said: Answer, is_good: bool) -> None:
    case = Case(number=1, family="good", path=path, pieces=[], body={})
    assert (fuzz_checks.check(case, said) == []) is is_good
