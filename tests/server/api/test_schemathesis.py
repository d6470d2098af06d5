"""schemathesis over the server's own description: no 5xx, no hang, answers as described.

FUZZ_EXAMPLES sets how many examples each operation gets; with it schemathesis also goes through
its systematic ones, a thousand and more of them.
"""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from tests.server.conftest import RunningServer, StartServer
from tests.server.raw_client import check_good

from headrace.server.api.openapi import describe
from headrace.server.api.routes import all_routes
from headrace.server.request.call import encode_json

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "30"))
LIMIT_S = 60.0  # generous: only a hang reaches it

# A description can't say all that makes a request good (a temperature's range, a model's name), so
# what it calls good may be refused; what it calls bad must be.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "negative_data_rejection"),
    *("unsupported_method", "allow_header_conformance"),
)

load_all_checks()
checks: list[Any] = list(schemathesis.checks.CHECKS.get_by_names(CHECKS))


@pytest.fixture(scope="session")
def fuzzed(start_server: StartServer) -> RunningServer:
    # What is described is what is known: a server that takes more would take what is called bad.
    return start_server(server={"timeout_s": 20.0, "unknown_fields": "refuse"})


# As the server describes itself, which a test below holds; so there is a test for each operation.
description = json.loads(encode_json(describe(all_routes())))
schema = schemathesis.openapi.from_dict(description)
schema.config.phases.coverage.enabled = "FUZZ_EXAMPLES" in os.environ


LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
REQUIRED = ("/v1/messages",)  # where a request without a length is a bad one, and stays so


def _shorten(path: str, body: Any) -> None:
    """A generated request may well be a good one: it shall neither fill the context, nor ask for
    less time than an answer takes, which is rightly answered with 503."""
    if not isinstance(body, dict):
        return
    for place, name in enumerate(LENGTHS.get(path, ())):
        sent = body.get(name)
        is_missing = sent is None and place == 0 and path not in REQUIRED
        if is_missing or (type(sent) is int and sent > 1):
            body[name] = 1
    if type(body.get("timeout_s")) in (int, float) and body["timeout_s"] > 0:
        body["timeout_s"] = 120


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
def test_every_operation(case: schemathesis.Case[Any], fuzzed: RunningServer) -> None:
    _shorten(case.path, case.body)
    case.call_and_validate(base_url=fuzzed.base_url, checks=checks, timeout=LIMIT_S)


def test_the_description_is_openapi(fuzzed: RunningServer) -> None:
    assert httpx.get(f"{fuzzed.base_url}/openapi.json").json() == description
    schema.validate()  # against OpenAPI's own schema


def test_every_route_is_described(fuzzed: RunningServer) -> None:
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            reply = httpx.request(method, fuzzed.base_url + path)
            assert str(reply.status_code) in operation["responses"]
            assert operation["summary"] != path, f"{path} has no docstring"


def test_afterwards_a_good_request_works_and_nothing_went_wrong(fuzzed: RunningServer) -> None:
    check_good(fuzzed.port)
    assert "Traceback" not in fuzzed.log
