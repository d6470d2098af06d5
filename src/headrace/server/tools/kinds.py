"""Tools of other kinds than functions: what becomes of them, and of functions in namespaces.

OpenAI's own tools (`web_search`, `file_search`, …) and `custom` ones (free text in a grammar) can't
be run or asked for here. As with fields that are not known, they are left out with a warning, or
refused. A `namespace` (Codex sends one for each MCP server) is a list of functions whose calls name
it beside the function: here they are functions with the namespace in front of their names. Knows
requests' words; what is done with functions is plan.py's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.bounds import TOOLS
from headrace.server.request.call import Call
from headrace.server.request.structured import wrong_value

JsonObject = dict[str, Any]

# Codex's word for "in no namespace".
_DEFAULT_NAMESPACE = "functions"


def callable_tools(call: Call, tools: Sequence[JsonObject] | None) -> list[JsonObject] | None:
    """A chat's tools that a model can be offered."""
    if tools is None:
        return None
    TOOLS.check("tools", len(tools))
    return [tool for i, tool in enumerate(tools) if is_function(call, tool, f"tools[{i}]")]


def is_function(call: Call, tool: object, param: str) -> bool:
    """Whether it is one, or at least no tool of another kind: what is no tool at all is for others
    to refuse. Warns of one of another kind, or refuses it, as the server was told."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return True
    if call.refuses_unknown:
        raise wrong_value(f"{param}.type", kind, "'function', the only kind of tool there is here")
    call.ignored_fields.append(param)
    call.warn(f"{param} is of the type {kind[:40]}, which is not supported, and was left out")
    return False


def flatten_namespaces(call: Call, tools: Sequence[JsonObject] | None) -> list[JsonObject]:
    """Tools in the shape of /v1/responses: functions alone, those in namespaces under longer
    names."""
    found: list[JsonObject] = []
    TOOLS.check("tools", len(tools or ()))
    for place, tool in enumerate(tools or ()):
        param = f"tools[{place}]"
        space = _namespace(tool)
        if space is None:
            found += [tool] if is_function(call, tool, param) else []
            continue
        if call.refuses_unknown:
            is_function(call, tool, param)
        TOOLS.check("tools", len(found) + len(tool["tools"]))
        for inner_place, inner in enumerate(tool["tools"]):
            if is_function(call, inner, f"{param}.tools[{inner_place}]"):
                name = inner.get("name") if isinstance(inner, dict) else None
                if not isinstance(name, str):
                    raise wrong_value(f"{param}.tools[{inner_place}].name", name, "text")
                found.append({**inner, "name": flat_name(space, name)})
    return found


def flat_name(namespace: object, name: str) -> str:
    """As Codex itself writes it where a name is all there is."""
    if not isinstance(namespace, str) or not namespace or namespace == _DEFAULT_NAMESPACE:
        return name
    joint = "" if namespace.endswith("_") or name.startswith("_") else "__"
    return f"{namespace}{joint}{name}"


def names_in_namespaces(tools: Sequence[Any] | None) -> Mapping[str, tuple[str, str]]:
    """What a flat name stands for: the namespace and the name in it."""
    return {
        flat_name(space, inner["name"]): (space, inner["name"])
        for tool in tools or ()
        if (space := _namespace(tool)) is not None
        for inner in tool["tools"]
        if isinstance(inner, dict) and isinstance(inner.get("name"), str)
    }


def _namespace(tool: object) -> str | None:
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        return None
    name, inner = tool.get("name"), tool.get("tools")
    return name if isinstance(name, str) and isinstance(inner, list) else None
