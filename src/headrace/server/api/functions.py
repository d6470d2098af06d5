"""OpenAI's `functions` and `function_call`, the predecessors of tools: refused.

A client that sends them expects a call in their shape: an answer that ignored them would mislead.
"""

from __future__ import annotations

from headrace.core.errors import InvalidRequestError
from headrace.server.request.schema import ChatRequest


def refuse_functions(sent: ChatRequest) -> None:
    if sent.functions:
        raise _refuse("functions", "tools")
    if sent.function_call:
        raise _refuse("function_call", "tool_choice")
    for place, message in enumerate(sent.messages):
        if message.get("function_call"):
            raise _refuse(f"messages[{place}].function_call", "tool_calls")
        if message.get("role") == "function":
            raise _refuse(f"messages[{place}].role 'function'", "role 'tool'")


def _refuse(old: str, new: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{old} is an older form of {new} and is not supported.",
        f"Send {new} instead.",
        param=old.partition(" ")[0],
    )
