"""/openapi.json: the description of this server's API, made from the routes and their structs.

Nothing is written twice: shapes come from server/request/schema.py and the endpoints' own structs,
descriptions from docstrings. Knows OpenAPI 3.1; no endpoint by name.
"""

from __future__ import annotations

import http
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.core.version import headrace_version
from headrace.server.api.route import EVENTS, JSON, Route
from headrace.server.request.call import AnyReply, Call, Endpoint, Reply, encode_json
from headrace.server.request.schema import IGNORED
from headrace.server.request.service import Service

_REF = "#/components/schemas/{name}"

# The template decides what a message may be; this much is common to all.
_MESSAGES = {
    "description": "The chat so far, as OpenAI has it.",
    "examples": [[{"role": "user", "content": "Name three rivers."}]],
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "object"}},
                    {"type": "null"},
                ]
            },
        },
    },
}

# Error statuses by the kind of route.
_ANYWHERE = (400, 403, 405, 431, 500)
_WITH_KEY = (401,)
_WITH_BODY = (404, 408, 413, 415, 422, 429, 503)
_WITH_PARAMETER = (404,)


class ErrorDetail(msgspec.Struct):
    """What was found and what was expected; the remedy says what to do."""

    message: str
    type: str
    param: str | None
    code: str | None
    remedy: str | None


class ErrorReply(msgspec.Struct):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


def describing(routes: Sequence[Route]) -> Endpoint:
    """The endpoint that describes the routes; the description is made on the first request."""
    made: list[bytes] = []

    async def openapi(service: Service, call: Call) -> AnyReply:
        """This description."""
        if not made:
            made.append(encode_json(describe(routes)))
        return Reply(body=made[0])

    return openapi


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    types = _types(routes)
    found, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    shapes = {id(each): schema for each, schema in zip(types, found, strict=True)}
    for kind, names in IGNORED.items():
        properties = schemas.get(kind.__name__, {}).get("properties")
        if properties is not None:
            properties |= {name: {"description": "Ignored, with a warning."} for name in names}
    for schema in schemas.values():
        messages = schema.get("properties", {}).get("messages")
        if messages is not None:
            messages |= _MESSAGES
    paths: dict[str, Any] = {}
    for route in routes:
        for method in route.methods:
            operation = _operation(route, method, shapes)
            paths.setdefault(route.path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": headrace_version(),
            "description": "An OpenAI-compatible server. Fields that are not OpenAI's are named "
            "as vLLM's.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _types(routes: Iterable[Route]) -> list[Any]:
    named = [kind for route in routes for kind in (route.request, route.response) if kind]
    named += [route.error_shape.reply_type for route in routes if route.error_shape.reply_type]
    return [ErrorReply, *{id(kind): kind for kind in named}.values()]


def _operation(route: Route, method: str, shapes: dict[int, Any]) -> dict[str, Any]:
    words = inspect.getdoc(route.endpoint) or ""
    summary = " ".join(words.partition("\n\n")[0].split()) or route.path
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path)}".rstrip("_"),
        "summary": summary,
        "responses": _responses(route, shapes),
        "security": [] if route.is_open else [{"key": []}, {"x_api_key": []}, {}],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    if route.query is not None:
        parameters += _query(route.query)
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        content = {JSON: {"schema": shapes[id(route.request)]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _query(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    [_], found = msgspec.json.schema_components([kind])
    properties = found[kind.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


def _responses(route: Route, shapes: dict[int, Any]) -> dict[str, Any]:
    schema = {"type": "object"} if route.response is None else shapes[id(route.response)]
    if route.content_type != JSON:
        schema = {"type": "string"}
    content: dict[str, Any] = {route.content_type: {"schema": schema}}
    if route.streams:
        content[EVENTS] = {}  # OpenAPI 3.1 can't describe events
    answers: dict[str, Any] = {"200": {"description": "As asked.", "content": content}}
    for status in sorted(_statuses(route)):
        answers[str(status)] = {
            "description": http.HTTPStatus(status).phrase,
            "content": {JSON: {"schema": shapes[id(route.error_shape.reply_type or ErrorReply)]}},
        }
        if status in (429, 503):
            after = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
            answers[str(status)]["headers"] = {"retry-after": after}
    for answer in answers.values():
        headers = answer.setdefault("headers", {})
        for name in ("x-request-id", route.error_shape.id_header):
            if name is not None:
                headers[name] = {"schema": {"type": "string"}}
    return answers


def _statuses(route: Route) -> set[int]:
    found = {*_ANYWHERE, *route.statuses}
    if not route.is_open:
        found.update(_WITH_KEY)
    if route.request is not None:
        found.update(_WITH_BODY)
    if "{" in route.path:
        found.update(_WITH_PARAMETER)
    return found
