"""The table of sampling parameters as HTTP has it: every API takes its rows, within their bounds.

The cases are made from core/sampling.py's rows, so that a new parameter is among them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from tests.server.conftest import RunningServer

from headrace.core.checks import Range, rule_of
from headrace.core.request import SamplingParams
from headrace.core.sampling import DrawFields, Taken, rows_of
from headrace.server.api.messages.schema import MessagesRequest
from headrace.server.api.responses.schema import ResponsesRequest
from headrace.server.request.schema import ChatRequest, CompletionRequest

HI: list[Any] = [{"role": "user", "content": "Say hi."}]
APIS: dict[str, tuple[Taken, type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (
        Taken.COMPLETIONS,
        CompletionRequest,
        {"prompt": "One, two,", "max_tokens": 1},
    ),
    "/v1/chat/completions": (
        Taken.COMPLETIONS,
        ChatRequest,
        {"messages": HI, "max_completion_tokens": 1},
    ),
    "/v1/responses": (
        Taken.RESPONSES,
        ResponsesRequest,
        {"input": "Say hi.", "max_output_tokens": 1, "store": False},
    ),
    "/v1/messages": (Taken.MESSAGES, MessagesRequest, {"messages": HI, "max_tokens": 1}),
}


def ranges(taken: Taken) -> Iterator[tuple[str, Range]]:
    for name, _ in rows_of(SamplingParams, taken):
        _, rule = rule_of(SamplingParams, name)
        if isinstance(rule, Range):
            yield name, rule


def outside(name: str, rule: Range) -> Iterator[float]:
    if rule.at_least is not None and name != "seed":  # OpenAI's seeds are signed
        yield rule.at_least - (1 if rule.is_whole else 1e-9)
    if rule.above is not None:
        yield float(rule.above)
    # Beyond 64 bits a body is refused as a whole.
    if rule.at_most is not None and rule.at_most < 2**63:
        yield rule.at_most + 1 if rule.is_whole else math.nextafter(rule.at_most, math.inf)


REFUSED = [
    pytest.param(path, name, value, id=f"{path}-{name}-{value}")
    for path, (taken, _, _) in APIS.items()
    for name, rule in ranges(taken)
    for value in outside(name, rule)
]


def send(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    body = APIS[path][2] | fields
    return httpx.post(server.base_url + path, json=body, timeout=120)


@pytest.mark.parametrize(("path", "name", "value"), REFUSED)
def test_just_outside_is_refused_by_name(
    short: RunningServer, path: str, name: str, value: float
) -> None:
    reply = send(short, path, **{name: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith(f"{name} is {json.dumps(value)}; ")
    assert error.get("param", name) == name  # Anthropic's errors have none


@pytest.mark.parametrize("path", APIS)
def test_the_bounds_themselves_are_taken(short: RunningServer, path: str) -> None:
    """Of what decides how a token is drawn; those of counts depend on other settings."""
    drawn = {name for name, _ in rows_of(DrawFields)}
    taken, _, _ = APIS[path]
    for name, rule in ranges(taken):
        low = rule.at_least if rule.above is None else rule.above + 0.01
        for value in (low, rule.at_most):
            if name in drawn and value is not None:
                reply = send(short, path, **{name: value})
                assert reply.status_code == 200, (name, value, reply.text)
                assert name not in reply.headers.get("x-headrace-warning", "")


@pytest.mark.parametrize("path", APIS)
def test_every_row_is_described(short: RunningServer, path: str) -> None:
    taken, kind, _ = APIS[path]
    found = httpx.get(f"{short.base_url}/openapi.json").json()["components"]["schemas"]
    properties = found[kind.__name__]["properties"]
    rows = dict(rows_of(SamplingParams, taken))
    assert rows
    for name, row in rows.items():
        assert properties[name]["description"] == row.help
        assert properties[name]["default"] is None
    others = {name for name, _ in rows_of(SamplingParams)} - rows.keys() - {"max_tokens"}
    assert not others & properties.keys()


@pytest.mark.parametrize("path", APIS)
def test_a_row_that_is_not_the_apis_is_an_unknown_field(short: RunningServer, path: str) -> None:
    taken, _, _ = APIS[path]
    rows = {name for name, _ in rows_of(SamplingParams, taken)}
    foreign = {name for name, _ in rows_of(DrawFields)} - rows
    for name in foreign:
        reply = send(short, path, **{name: 0.5})
        assert name in reply.headers["x-headrace-warning"]
