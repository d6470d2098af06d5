"""Tools that are not functions are left out or refused; namespaces become plain functions.

OpenAI's own tools (`web_search`, `file_search`, …) and `custom` ones (free text in a grammar) are
not supported. Like unknown fields, they are left out with a warning, or refused. A `namespace`
(Codex sends one for each MCP server) is a list of functions whose calls name both namespace and
function: here they become functions with the namespace as a prefix of their names. Knows the shapes
of requests; plan.py uses the functions.
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
    """Whether it is a function, or not a valid tool at all (others refuse those). A tool of another
    kind gets a warning or is refused, as --unknown-fields says."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return True
    if call.refuses_unknown:
        raise wrong_value(f"{param}.type", kind, "'function', the only supported kind of tool")
    call.ignored_fields.append(param)
    call.warn(f"{param} is of the type {kind[:40]}, which is not supported, and was left out")
    return False


def flatten_namespaces(call: Call, tools: Sequence[JsonObject] | None) -> list[JsonObject]:
    """The functions among the tools of a /v1/responses request, those of namespaces with their
    prefix."""
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
    """As Codex itself joins namespace and name."""
    if not isinstance(namespace, str) or not namespace or namespace == _DEFAULT_NAMESPACE:
        return name
    joint = "" if namespace.endswith("_") or name.startswith("_") else "__"
    return f"{namespace}{joint}{name}"


def names_in_namespaces(tools: Sequence[Any] | None) -> Mapping[str, tuple[str, str]]:
    """Splits a flat name into its namespace and the name in it."""
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
