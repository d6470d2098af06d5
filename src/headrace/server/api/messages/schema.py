"""The fields of /v1/messages, and their conversion into a chat.

Anthropic's shape is a chat's with other names: the system prompt has its own field, contents are
blocks (blocks.py), tools have an input_schema. Knows both shapes;
neither engine nor HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.bounds import TOOLS, shown
from headrace.core.checks import check_value
from headrace.core.request import SamplingParams
from headrace.core.sampling import Taken
from headrace.server.api.messages.blocks import chat_messages
from headrace.server.request.body import MAX_TOLD
from headrace.server.request.call import Call
from headrace.server.request.sampling_fields import sampling_fields, takes_sampling
from headrace.server.request.schema import IGNORED, ChatRequest
from headrace.server.request.structured import wrong_value

JsonObject = dict[str, Any]


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that make up the prompt."""

    messages: list[JsonObject]
    model: str | None = None
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None
    output_format: JsonObject | None = None  # the older field for it
    # Without effect here: every prefix is cached, and there are no service tiers.
    cache_control: JsonObject | None = None
    speed: str | None = None
    # Not Anthropic's: named as vLLM's.
    chat_template_kwargs: JsonObject | None = None


@takes_sampling(Taken.MESSAGES)
class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    # Also without effect.
    metadata: JsonObject | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    # Not Anthropic's: named as vLLM's.
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    speculate: str | None = None


_IGNORED = {
    *("container", "context_management", "mcp_servers", "betas", "diagnostics", "effort"),
    *("user_profile_id", "workspace_id", "fallbacks", "task_budget"),
}
IGNORED[CountTokensRequest] = frozenset(
    _IGNORED | set(MessagesRequest.__struct_fields__) - set(CountTokensRequest.__struct_fields__)
)
IGNORED[MessagesRequest] = frozenset(_IGNORED)

_SAME = ("stream", "cache_salt", "priority", "timeout_s", "speculate")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(call: Call, sent: CountTokensRequest) -> ChatRequest:
    """The same request as a chat. Its max_tokens is left out: see endpoint.py."""
    messages = chat_messages(call, sent.system, sent.messages)
    if sent.thinking is not None and sent.thinking.get("type") != "disabled":
        call.warn("thinking is not supported and was ignored")
    tool_choice, parallel = _tool_choice(sent.tool_choice)
    fields: JsonObject = {}
    if isinstance(sent, MessagesRequest):
        check_value(SamplingParams, "max_tokens", sent.max_tokens)
        fields = {name: getattr(sent, name) for name in _SAME}
        fields |= sampling_fields(sent, Taken.MESSAGES)
        fields["stop"] = sent.stop_sequences or None
    last = messages[-1] if messages else {}
    return ChatRequest(
        messages=messages,
        model=sent.model,
        tools=_tools(call, sent.tools or []) or None,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(call, sent),
        chat_template_kwargs=sent.chat_template_kwargs,
        # The last message is a partial answer: continue it.
        continue_final_message=last.get("role") == "assistant" and "tool_calls" not in last,
        **fields,
    )


def _tools(call: Call, sent: list[JsonObject]) -> list[JsonObject]:
    tools = []
    TOOLS.check("tools", len(sent))
    for place, tool in enumerate(sent):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            call.warn(f"tools[{place}] is a {shown(kind)}, which is not supported, and was ignored")
            continue
        function: JsonObject = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if not isinstance(function["parameters"], dict):
            raise wrong_value(f"tools[{place}].input_schema", function["parameters"], "a schema")
        for name in ("description", "strict"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(sent: JsonObject | None) -> tuple[str | JsonObject | None, bool | None]:
    """A chat's tool_choice and parallel_tool_calls."""
    if sent is None:
        return None, None
    alone = sent.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise wrong_value("tool_choice.disable_parallel_tool_use", alone, "true or false")
    parallel = None if alone is None else not alone
    kind = sent.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": sent.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong_value("tool_choice.type", kind, "'auto', 'any', 'tool' or 'none'")
    return _CHOICES[kind], parallel


def _response_format(call: Call, sent: CountTokensRequest) -> JsonObject | None:
    config = dict(sent.output_config or {})
    form = config.pop("format", None)
    if form is None:
        form = sent.output_format
    for name in list(config)[:MAX_TOLD]:
        call.warn(f"output_config.{name[:40]} is not supported and was ignored")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        found = form.get("type") if isinstance(form, dict) else form
        raise wrong_value("output_config.format.type", found, "'json_schema'")
    if not isinstance(form.get("schema"), dict):
        raise wrong_value("output_config.format.schema", form.get("schema"), "a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
