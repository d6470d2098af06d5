"""Fields that are not known, and those of other servers that do nothing here: what is said of them,
by the two settings. In this process, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ConfigError, InvalidRequestError
from headrace.core.server_config import ServerConfig, UnknownFields
from headrace.server.api.responses.schema import ResponsesRequest, as_chat
from headrace.server.request import body
from headrace.server.request.body import read_struct
from headrace.server.request.call import MAX_WARNING_CHARACTERS, Call, take_request_id
from headrace.server.request.inert import OTHERS
from headrace.server.request.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from headrace.server.tools.kinds import callable_tools, flat_name, names_in_namespaces

NEEDED: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatRequest: {"messages": []},
    CompletionRequest: {"prompt": "x"},
    EmbeddingRequest: {"input": "x"},
    TokenizeRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
}


def call_with(fields: dict[str, Any], *, refuses: bool = False) -> Call:
    return Call(
        method="POST",
        path="/",
        headers={},
        request_id="r",
        body=json.dumps(fields).encode(),
        refuses_unknown=refuses,
    )


def warnings_of(kind: type[msgspec.Struct], *, refuses: bool = False, **fields: Any) -> list[str]:
    call = call_with({**NEEDED[kind], **fields}, refuses=refuses)
    asyncio.run(read_struct(call, kind))
    return call.warnings


@pytest.mark.parametrize("kind", list(NEEDED))
def test_an_unknown_field_is_left_out_or_refused(kind: type[msgspec.Struct]) -> None:
    assert warnings_of(kind, zzyzx=1) == ["zzyzx is an unknown field and was ignored"]
    assert warnings_of(kind, zzyzx=None) == []
    for value in (1, None):
        with pytest.raises(InvalidRequestError, match="Unknown field 'zzyzx'"):
            warnings_of(kind, refuses=True, zzyzx=value)


def test_a_likely_misspelling_is_named() -> None:
    assert warnings_of(ChatRequest, temprature=1) == [
        "temprature is an unknown field and was ignored (did you mean temperature?)"
    ]
    assert warnings_of(ChatRequest, stream=True, stream_options={"include_usag": True}) == [
        "stream_options.include_usag is an unknown field and was ignored "
        "(did you mean include_usage?)"
    ]
    assert warnings_of(CompletionRequest, structured_outputs={"regexp": "a"}) == [
        "structured_outputs.regexp is an unknown field and was ignored (did you mean regex?)"
    ]
    assert warnings_of(ResponsesRequest, text={"formatt": {}}) == [
        "text.formatt is an unknown field and was ignored (did you mean format?)"
    ]


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_other_servers_fields_that_are_off_are_nothing_to_speak_of(name: str) -> None:
    if name in {"best_of", "echo"}:
        kinds: list[type[msgspec.Struct]] = [ChatRequest]
    else:
        kinds = [kind for kind in NEEDED if name not in kind.__struct_fields__]
    for kind in kinds:
        for off in (None, *OTHERS[name]):
            for refuses in (True, False):
                assert warnings_of(kind, refuses=refuses, **{name: off}) == []
        on: Any = {"something": "else"}
        assert warnings_of(kind, **{name: on}) == [f"{name} is not supported and was ignored"]
        with pytest.raises(InvalidRequestError, match="Unknown field"):
            warnings_of(kind, refuses=True, **{name: on})


def test_true_is_not_one() -> None:
    assert warnings_of(ChatRequest, best_of=True)
    assert warnings_of(ChatRequest, mirostat=False)
    assert not warnings_of(ChatRequest, best_of=1, mirostat=0, length_penalty=1)


def test_the_header_is_short_and_safe() -> None:
    call = call_with({"messages": [], **{f"é\r\nx{i}": 1 for i in range(1000)}})
    asyncio.run(read_struct(call, ChatRequest))
    header = call.warning_header()
    assert header.isascii()
    assert header.isprintable()
    assert len(header) <= MAX_WARNING_CHARACTERS + 20
    assert header.endswith("more unknown fields were ignored")


def test_the_setting() -> None:
    assert ServerConfig().unknown_fields is UnknownFields.WARN
    assert ServerConfig(unknown_fields="refuse").unknown_fields is UnknownFields.REFUSE  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one of warn, refuse"):
        ServerConfig(unknown_fields="shrug")  # type: ignore[arg-type]


def test_a_request_id_in_the_body() -> None:
    call = call_with({})
    take_request_id(call, "mine-1")
    assert call.request_id == "mine-1"
    take_request_id(call, "not\nmine")
    assert call.request_id == "mine-1"
    assert len(call.warnings) == 1
    call.headers = {"x-request-id": "r"}
    take_request_id(call, "other")
    assert call.request_id == "mine-1"


# -- tools -----------------------------------------------------------------------------------------

NOW = {"type": "function", "function": {"name": "now"}}
SEARCH = {"type": "web_search"}
FILES = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [
        {"type": "function", "name": "list", "parameters": {}},
        {"type": "custom", "name": "patch"},
    ],
}


def test_tools_of_other_kinds_in_a_chat() -> None:
    call = call_with({})
    assert callable_tools(call, [SEARCH, NOW, FILES]) == [NOW]
    assert [text.split(" is of the type ")[0] for text in call.warnings] == ["tools[0]", "tools[2]"]
    assert callable_tools(call, None) is None
    assert callable_tools(call, [{}]) == [{}]  # no tool at all, for others to refuse
    with pytest.raises(InvalidRequestError, match="web_search"):
        callable_tools(call_with({}, refuses=True), [NOW, SEARCH])


def test_functions_in_namespaces_have_longer_names() -> None:
    """As Codex writes them: a call that the model makes must find its way back."""
    again = {"type": "function_call", "call_id": "c", "name": "list", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "none"}
    sent = msgspec.convert(
        {"input": [{**again, "namespace": "mcp__files"}, result], "tools": [SEARCH, FILES]},
        ResponsesRequest,
    )
    call = call_with({})
    chat = as_chat(call, sent, [])
    assert chat.tools is not None
    assert [tool["function"]["name"] for tool in chat.tools] == ["mcp__files__list"]
    assert chat.messages[0]["tool_calls"][0]["function"]["name"] == "mcp__files__list"
    assert len(call.warnings) == 2  # the search, and what is no function in the namespace
    assert names_in_namespaces(sent.tools)["mcp__files__list"] == ("mcp__files", "list")
    assert flat_name("functions", "shell") == flat_name(None, "shell") == "shell"
    assert flat_name("mcp__files__", "list") == flat_name("mcp__files", "__list")
    with pytest.raises(InvalidRequestError, match="namespace"):
        as_chat(call_with({}, refuses=True), msgspec.structs.replace(sent, tools=[FILES]), [])


def test_what_was_meant_is_looked_for_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may have a hundred thousand fields; nobody else is answered while they are read."""
    looked: list[str] = []
    monkeypatch.setattr(body, "_nearest", lambda name, known: looked.append(name))
    call = call_with({"messages": [], **{f"field{i}": 1 for i in range(5000)}})
    asyncio.run(read_struct(call, ChatRequest))
    assert len(looked) == body.MAX_TOLD
    assert len(call.warnings) == len(call.ignored_fields) == body.MAX_TOLD + 1
