"""How models write tool calls: one ToolFormat per convention, and a grammar that enforces it.

    opening first NAME middle ARGUMENTS trail (again NAME middle ARGUMENTS trail)* end

Which one a model was trained on shows in its chat template. Knows text and llguidance's dialect
of Lark; no requests.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.tokenizer.tokenizer import Tokenizer

JsonObject = dict[str, Any]

# Per answer. A small model may repeat calls without end, and the answer must end; no agent is known
# to need more at a time.
MAX_CALLS = 16

# As Python writes JSON, which most training data follows; endless whitespace is impossible.
_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    parameters: JsonObject  # a JSON schema of an object
    strict: bool = (
        False  # refuse schema keywords that the compiler does not know, instead of ignoring them
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The texts as above. With an empty `opening` an answer is either a call or text, not both."""

    opening: str
    first: str
    middle: str
    trail: str
    again: str | None  # None: one call per answer
    end: str = ""
    is_padded: bool = False  # some models write a space after the opening
    tags: tuple[str, ...] = ()  # parts that may be single tokens of the vocabulary
    id_length: int | None = None  # for templates that demand a certain length of a call's id

    def new_id(self) -> str:
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.id_length))

    def write(self, calls: Sequence[tuple[str, JsonObject]]) -> str:
        """Calls as the model would write them."""
        text = self.opening + self.first
        for place, (name, arguments) in enumerate(calls):
            text += (self.again or "") if place else ""
            text += name + self.middle + json.dumps(arguments, ensure_ascii=False) + self.trail
        return text + self.end


HERMES = ToolFormat(
    opening="<tool_call>",
    first='\n{"name": "',
    middle='", "arguments": ',
    trail="}\n</tool_call>",
    again='\n<tool_call>\n{"name": "',
    tags=("<tool_call>", "</tool_call>"),
)
LLAMA = ToolFormat(
    opening="", first='{"name": "', middle='", "parameters": ', trail="}", again=None
)
MISTRAL = ToolFormat(
    opening="[TOOL_CALLS]",
    first='[{"name": "',
    middle='", "arguments": ',
    trail="}",
    again=', {"name": "',
    end="]",
    is_padded=True,
    tags=("[TOOL_CALLS]",),
    id_length=9,
)

_LLAMA_PROMPT = re.compile(r'"name":[^{}]*"parameters":|<\|python_tag\|>')


def find_format(template: str) -> ToolFormat | None:
    """The convention of a chat template; None if it does not support tools, or its convention is
    not known here."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        # Some write each argument in a tag of its own.
        return None if "<function=" in template else HERMES
    return LLAMA if _LLAMA_PROMPT.search(template) else None


def find_tag_ids(tool_format: ToolFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """The tags that are control tokens, which plain text can't produce."""
    pieces = {tokenizer.piece(token): token for token in tokenizer.special_ids}
    return {tag: pieces[tag] for tag in tool_format.tags if tag in pieces}


def write_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    tag_ids: Mapping[str, int],
    *,
    forced: bool,
    parallel: bool,
    answer: JsonObject | None = None,
) -> str:
    """A grammar for answers: calls if `forced`; otherwise text (or JSON of the schema `answer`) in
    which an opening tag must be followed by calls, which end the answer. One call, or with
    `parallel` up to MAX_CALLS."""

    def literal(text: str) -> str:
        return _literal(text, tag_ids)

    lines = _start(tool_format, tag_ids, forced=forced, answer=answer)
    padding = "/ ?/" if tool_format.is_padded else ""
    again = ""
    if parallel and tool_format.again is not None:
        again = f"({literal(tool_format.again)} call){{0,{MAX_CALLS - 1}}}"
    lines += [
        f"calls: {padding} {literal(tool_format.first)} call {again} {literal(tool_format.end)}",
        f"call: one {literal(tool_format.trail)}",
    ]
    choices = []
    for place, tool in enumerate(tools):
        lines.append(f"arguments_{place}: {_inline(tool.parameters, lenient=not tool.strict)}")
        choices.append(f"{literal(tool.name + tool_format.middle)} arguments_{place}")
    lines.append("one: " + " | ".join(choices))
    return "\n".join(lines) + "\n"


def _start(
    tool_format: ToolFormat,
    tag_ids: Mapping[str, int],
    *,
    forced: bool,
    answer: JsonObject | None,
) -> list[str]:
    opening = _literal(tool_format.opening, tag_ids)
    if forced or answer is not None:
        other = "" if forced else " | answer"
        rules = [f"start: {opening} calls{other}"]
        return rules if answer is None or forced else [*rules, f"answer: {_inline(answer)}"]
    if not tool_format.opening:
        return ["start: TEXT | calls", r"TEXT: /([^{](?s:.*))?/"]
    if tool_format.opening in tag_ids:
        return [f"start: TEXT | TEXT {opening} calls", "TEXT: /(?s:.*)/"]
    tag = re.sub(r"([^\w<>])", r"\\\1", tool_format.opening)
    # The lazy rule wins as soon as its tag is complete: from there only calls may follow.
    return [
        "start: TEXT | opening calls",
        "TEXT: /(?s:.*)/",
        f"opening[lazy]: /(?s:.*){tag}/",
    ]


def _literal(text: str, tag_ids: Mapping[str, int]) -> str:
    """A text in Lark: control tokens by id, the rest quoted."""
    if not text:
        return ""
    if not tag_ids:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, tag_ids)) + ")", text)
    return " ".join(
        f"<[{tag_ids[part]}]>" if part in tag_ids else json.dumps(part) for part in parts if part
    )


def _inline(schema: JsonObject, *, lenient: bool = False) -> str:
    options = {**_WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
