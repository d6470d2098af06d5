"""Stored answers of /v1/responses: fetching, continuing and deleting them, listing their input.

Knows OpenAI's shapes of these; store.py stores them.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec

from headrace.core.errors import InvalidRequestError
from headrace.server.api.responses.store import StoredResponse
from headrace.server.request.call import (
    AnyReply,
    Call,
    NotFoundError,
    Reply,
    encode_json,
    json_reply,
)
from headrace.server.request.query import read_query
from headrace.server.request.service import Service

JsonObject = dict[str, Any]

RESPONSES_PATH = "/v1/responses/"
INPUT_ITEMS = "/input_items"

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


class RetrieveQuery(msgspec.Struct):
    stream: bool = False


class ItemsQuery(msgspec.Struct):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str = ""


# -- endpoints -------------------------------------------------------------------------------------


async def retrieve_response(service: Service, call: Call) -> AnyReply:
    """A response that was stored, as it was answered."""
    if read_query(call, RetrieveQuery).stream:
        raise InvalidRequestError(
            "stream is true, but the events of a response are not stored.",
            "Leave it out: the response is returned whole.",
            param="stream",
        )
    _, found = _find(service, call)
    return Reply(body=found.response)


async def delete_response(service: Service, call: Call) -> AnyReply:
    """Forgets a response. Those that went on from it stay whole."""
    response_id, _ = _find(service, call)
    service.responses.delete(response_id, call.key_name)
    return json_reply({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(service: Service, call: Call) -> AnyReply:
    """All items that led to a response that was stored, the conversation before it too."""
    query = read_query(call, ItemsQuery)
    _, found = _find(service, call, INPUT_ITEMS)
    items: list[JsonObject] = msgspec.json.decode(found.input_items)
    if query.order == "desc":
        items.reverse()
    if query.after:
        places = [place for place, item in enumerate(items) if item["id"] == query.after]
        if not places:
            raise InvalidRequestError(
                f"after is {query.after[:100]!r}, which is not an item of this response.",
                "Send the id of a listed item.",
                param="after",
            )
        items = items[places[0] + 1 :]
    page = items[: query.limit]
    return json_reply(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


# -- for the endpoint that answers -----------------------------------------------------------------


def items_before(
    service: Service, call: Call, previous_id: str | None
) -> tuple[list[JsonObject], int]:
    """The conversation that a request continues (an earlier answer and its input items), and its
    rough size in bytes."""
    if previous_id is None:
        return [], 0
    found = service.responses.get(previous_id, call.key_name)
    if found is None:
        raise InvalidRequestError(
            f"previous_response_id: there is no response {previous_id[:100]!r}{_why(service)}.",
            "Send the whole conversation as input items.",
            param="previous_response_id",
        )
    items: list[JsonObject] = msgspec.json.decode(found.input_items)
    output: list[JsonObject] = msgspec.json.decode(found.response)["output"]
    return items + output, found.size_bytes


def listed_items(sent: str | list[JsonObject]) -> list[JsonObject]:
    """A request's input as full items, each with an id. It was checked as a chat before."""
    if isinstance(sent, str):
        sent = [{"role": "user", "content": sent}]
    return [_listed(item) for item in sent]


def _listed(item: JsonObject) -> JsonObject:
    kind = item.get("type", "message")
    listed = {**item, "type": kind}
    if not isinstance(item.get("id"), str) or not item["id"]:
        listed["id"] = f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"
    if kind == "message":
        listed.setdefault("status", "completed")
        if isinstance(item.get("content"), str):
            part: JsonObject = {"type": "input_text", "text": item["content"]}
            if item.get("role") == "assistant":
                part |= {"type": "output_text", "annotations": []}
            listed["content"] = [part]
    return listed


def keep(service: Service, call: Call, response: JsonObject, input_items: list[JsonObject]) -> bool:
    return service.responses.put(
        response["id"],
        owner=call.key_name,
        response=encode_json(response),
        input_items=encode_json(input_items),
    )


# -- inside ----------------------------------------------------------------------------------------


def _find(service: Service, call: Call, end: str = "") -> tuple[str, StoredResponse]:
    response_id = call.path.removeprefix(RESPONSES_PATH).removesuffix(end)
    found = service.responses.get(response_id, call.key_name)
    if found is None:
        raise NotFoundError(f"There is no response {response_id[:100]!r}{_why(service)}.")
    return response_id, found


def _why(service: Service) -> str:
    if service.responses.is_on:
        return " stored here: it was never stored, belongs to another key, or has expired"
    return " stored here: this server stores nothing (--max-stored-responses is 0)"
