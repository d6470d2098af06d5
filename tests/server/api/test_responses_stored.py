"""Responses that are kept, through the official SDK, against real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.server.conftest import RunningServer, StartServer

MODEL = "smollm2"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(client: openai.OpenAI, said: Any = "My name is Ada.", **more: Any) -> Any:
    fields = {"model": MODEL, "input": said, "temperature": 0, "max_output_tokens": 8}
    return client.responses.create(**{**fields, **more})


def ids(page: Any) -> list[str]:
    return [item.id for item in page.data]


def test_an_answer_can_be_fetched_as_it_was(client: openai.OpenAI) -> None:
    made = ask(client, metadata={"a": "b"})
    assert made.store is True
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()


def test_a_stream_is_kept_too(client: openai.OpenAI) -> None:
    last = list(ask(client, stream=True))[-1]
    found = client.responses.retrieve(last.response.id)
    assert found.model_dump() == last.response.model_dump()
    assert found.status in ("completed", "incomplete")


def test_deleted_is_gone(client: openai.OpenAI, server: RunningServer) -> None:
    made = ask(client)
    url = f"{server.base_url}/v1/responses/{made.id}"
    assert httpx.delete(url).json() == {"id": made.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    made = ask(client, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ask(client, previous_response_id=made.id)


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be kind.")
    second = ask(client, "What is my name?", previous_response_id=first.id)
    third = ask(client, "Spell it.", previous_response_id=second.id, instructions="Be brief.")
    assert second.previous_response_id == first.id
    told = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    # Instructions are not carried over.
    assert ask(client, told, store=False).output_text == second.output_text
    told += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "Spell it."},
    ]
    whole = ask(client, told, instructions="Be brief.", store=False)
    assert whole.output_text == third.output_text
    assert whole.usage.input_tokens == third.usage.input_tokens


def test_it_goes_on_when_earlier_answers_are_gone(client: openai.OpenAI) -> None:
    first = ask(client)
    second = ask(client, "What is my name?", previous_response_id=first.id)
    before = ask(client, "Spell it.", previous_response_id=second.id)
    client.responses.delete(first.id)
    after = ask(client, "Spell it.", previous_response_id=second.id)
    assert after.output_text == before.output_text
    with pytest.raises(openai.BadRequestError, match="no response"):
        ask(client, "Spell it.", previous_response_id=first.id)


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], "parallel_tool_calls": False, "max_output_tokens": 40}
    made = ask(client, "Weather in Paris?", tool_choice="required", **fields)
    [call] = made.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C, rain"}
    went_on = ask(client, [result], previous_response_id=made.id, tools=[WEATHER])
    turns = [{"role": "user", "content": "Weather in Paris?"}, call.model_dump(), result]
    told = ask(client, turns, tools=[WEATHER], store=False)
    assert went_on.usage.input_tokens == told.usage.input_tokens
    assert went_on.output_text == told.output_text


def test_input_items(client: openai.OpenAI, server: RunningServer) -> None:
    first = ask(client)
    said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Name?"}]
    second = ask(client, said, previous_response_id=first.id)
    page = client.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in page.data]  # type: ignore[union-attr, index]
    assert texts == ["My name is Ada.", first.output_text, "Be brief.", "Name?"]
    assert len(set(ids(page))) == 4
    newest = client.responses.input_items.list(second.id)
    assert ids(newest) == ids(page)[::-1]
    assert list(client.responses.input_items.list(second.id, limit=1, order="asc")) == page.data
    part = client.responses.input_items.list(second.id, limit=2, after=ids(page)[0], order="asc")
    assert ids(part) == ids(page)[1:3]
    url = f"{server.base_url}/v1/responses/{second.id}/input_items"
    body = httpx.get(url, params={"limit": 2}).json()
    assert (body["object"], body["has_more"]) == ("list", True)
    assert [body["first_id"], body["last_id"]] == [item["id"] for item in body["data"]]
    for wrong in ("limit=0", "limit=101", "limit=x", "order=up", "limit=1&limit=2", "after=none"):
        assert httpx.get(f"{url}?{wrong}").status_code == 400, wrong
    assert httpx.get(f"{url.replace('resp_', 'resq_')}").status_code == 404


def test_events_can_not_be_fetched(client: openai.OpenAI, server: RunningServer) -> None:
    url = f"{server.base_url}/v1/responses/{ask(client).id}"
    assert httpx.get(f"{url}?stream=false").status_code == 200
    assert httpx.get(f"{url}?stream=true").json()["error"]["param"] == "stream"
    assert httpx.post(url).headers["allow"] == "GET, DELETE, HEAD"


# -- whose they are --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(f'[[keys]]\nname = "{n}"\nkey = "key-of-{n}"\n' for n in ("a", "b")))
    path.chmod(0o600)
    return start_server(server={"api_keys_file": path, "max_stored_responses": 2})


@pytest.fixture(scope="module")
def two(keyed: RunningServer) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    url = f"{keyed.base_url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="key-of-a", max_retries=0) as one,
        openai.OpenAI(base_url=url, api_key="key-of-b", max_retries=0) as other,
    ):
        yield one, other


def test_no_key_reads_anothers(two: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    mine, other = two
    made = ask(mine)
    for call in (
        lambda: other.responses.retrieve(made.id),
        lambda: other.responses.delete(made.id),
        lambda: other.responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError):
        ask(other, previous_response_id=made.id)
    assert mine.responses.retrieve(made.id).id == made.id


def test_a_server_keeps_so_many(two: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    mine, _ = two
    first, second, third = (ask(mine, max_output_tokens=1).id for _ in range(3))
    assert mine.responses.retrieve(second).id == second
    assert mine.responses.retrieve(third).id == third
    with pytest.raises(openai.NotFoundError):
        mine.responses.retrieve(first)


def test_a_server_that_keeps_none_says_so(start_server: StartServer) -> None:
    started = start_server(server={"max_stored_responses": 0})
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 1}
    url = f"{started.base_url}/v1/responses"
    made = httpx.post(url, json=body, timeout=60)
    assert made.json()["store"] is False
    assert "x-headrace-warning" not in made.headers
    asked = httpx.post(url, json={**body, "store": True}, timeout=60)
    assert "--max-stored-responses" in asked.headers["x-headrace-warning"]
    gone_on = httpx.post(url, json={**body, "previous_response_id": made.json()["id"]}, timeout=60)
    assert gone_on.status_code == 400
    fetched = httpx.get(f"{url}/{made.json()['id']}")
    assert fetched.status_code == 404
    for reply in (gone_on, fetched):
        assert "--max-stored-responses is 0" in json.dumps(reply.json())
