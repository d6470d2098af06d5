"""Renders a chat as the text and tokens a model was trained on, with the model's own template.

Messages are checked here, and a control token that a user typed into one stays plain text: a user
can't open a system turn. template_sandbox.py runs templates safely.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from headrace.core.errors import InvalidRequestError, TemplateError
from headrace.tokenizer.template_sandbox import CompiledTemplate
from headrace.tokenizer.tokenizer import Tokenizer

MAX_NESTING = 32
# Unicode noncharacters, which texts do not use; if one does, another is taken. Tokenizer uses
# U+FDEF.
MARKERS = tuple(map(chr, range(0xFDD0, 0xFDEF)))

_ROLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\- ]{0,63}")
# A template that iterates over a content's parts itself; others expect a string.
_READS_PARTS = re.compile(r"\bfor\s+[\w\s,]+\s+in\s+[^%}]*content", re.IGNORECASE)
_SIGN = re.compile(r"[^\w\s]")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OWN_NAMES = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token"),
        *("dict", "namespace", "raise_exception", "range", "strftime_now", "loop", "caller"),
    }
)


class ChatTemplate:
    """One model's template. Safe to share between threads."""

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        if not source:
            raise TemplateError(
                "This model's files have no chat template, so messages can't be put in the form "
                "it was trained on.",
                "Send a plain prompt instead of messages.",
            )
        self._tokenizer = tokenizer
        self._source = source
        self._template = CompiledTemplate(source, clock=clock)
        self._takes_parts = bool(_READS_PARTS.search(source))
        self._tokens = {
            name: tokenizer.piece(token)
            for name, token in (
                ("bos_token", tokenizer.bos_id),
                ("eos_token", tokenizer.eos_id),
                ("pad_token", tokenizer.pad_id),
            )
            if token is not None
        }
        self._typed = _TypedControls(tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **extra: object,
    ) -> str:
        """The chat as text. Do not tokenize this if users wrote parts of it: use `encode`."""
        return self._render(self._variables(messages, tools, extra), add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **extra: object,
    ) -> list[int]:
        """The chat as token ids; control tokens come only from the template.

        With `continue_final_message` the ids end where the last message's text does, and the model
        continues from there.
        """
        variables = self._variables(messages, tools, extra)
        strings = list(_strings(variables))
        end = None
        if continue_final_message:
            end = _free_marker([*strings, self._source])
            _append(variables["messages"][-1], end)
            strings.append(end)
        if not any(map(self._typed.places, strings)):
            text = self._render(variables, add_generation_prompt)
            return self._tokenizer.encode_template(_cut(text, end))
        marker = _free_marker([*strings, self._source])
        roles = [message["role"] for message in variables["messages"]]
        variables = _marked(variables, self._typed, marker)
        for message, role in zip(variables["messages"], roles, strict=True):
            message["role"] = role  # a checked word; templates make control tokens of it
        text = self._render(variables, add_generation_prompt)
        text = text.replace(_escaped(marker), marker)  # a template may write ASCII JSON
        return self._tokenizer.encode_template(_cut(text, end), marker=marker)

    def _variables(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        extra: Mapping[str, object],
    ) -> dict[str, Any]:
        for name in extra:
            if name in _OWN_NAMES:
                raise InvalidRequestError(
                    f"{name!r} can't be passed to a chat template; the name is reserved.",
                    "Leave it out.",
                    param=name,
                )
        checked: dict[str, Any] = {name: _plain(value, name) for name, value in extra.items()}
        checked["messages"] = _check_messages(messages, keep_parts=self._takes_parts)
        checked["tools"] = None if tools is None else _check_tools(tools)
        checked.setdefault("documents", None)
        return checked

    def _render(self, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        return self._template.render(
            {**self._tokens, **variables, "add_generation_prompt": add_generation_prompt}
        )


class _TypedControls:
    """Finds where a user's string holds, or could become part of, a control token's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = tokenizer.reserved_texts
        # A lookahead, so that overlapping ones are all found.
        self._whole = re.compile(f"(?=(?:{tokenizer.reserved_pattern.pattern}))")
        # A template may join strings: "<|im_" and "end|>". Beginnings that are only letters are
        # not marked: too many words end in such a letter.
        starts = {text[:length] for text in texts for length in range(1, len(text))}
        self._starts = frozenset(start for start in starts if _SIGN.search(start))
        self._longest = max(map(len, texts), default=1) - 1

    def places(self, text: str) -> list[int]:
        """Where to break `text`: one character into each control token, whole or begun."""
        found = {match.start() + 1 for match in self._whole.finditer(text)}
        for length in range(1, min(self._longest, len(text)) + 1):
            if text[-length:] in self._starts:
                found.add(len(text) - length + 1)
        return sorted(found)


def _refuse(param: str, found: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} is {found}; expected {expected}.", "Correct it and send it again.", param=param
    )


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _check_messages(messages: object, *, keep_parts: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise _refuse("messages", _kind(messages), "a list of messages")
    if not messages:
        raise _refuse("messages", "empty", "at least one message")
    return [
        _check_message(message, f"messages[{place}]", keep_parts=keep_parts)
        for place, message in enumerate(messages)
    ]


def _check_message(message: object, param: str, *, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refuse(param, _kind(message), "an object with role and content")
    checked: dict[str, Any] = _plain(message, param)
    role = checked.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        found = repr(role[:80]) if isinstance(role, str) else _kind(role)
        raise _refuse(f"{param}.role", found, "a word such as 'system', 'user' or 'assistant'")
    content = checked.get("content")
    if isinstance(content, list):
        texts = _check_parts(content, f"{param}.content")
        if not keep_parts:
            checked["content"] = "\n".join(texts)
    elif not isinstance(content, str) and not (content is None and checked.get("tool_calls")):
        raise _refuse(f"{param}.content", _kind(content), "text, or a list of text parts")
    # One thing has three names; templates read any of them.
    reasoning = next((checked[key] for key in _REASONING if checked.get(key) is not None), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _check_parts(parts: list[Any], param: str) -> list[str]:
    texts = []
    for place, part in enumerate(parts):
        where = f"{param}[{place}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            found = repr(part.get("type")) if isinstance(part, dict) else _kind(part)
            raise _refuse(f"{where}.type", found, "'text', the only kind this engine takes")
        if not isinstance(part.get("text"), str):
            raise _refuse(f"{where}.text", _kind(part.get("text")), "text")
        texts.append(part["text"])
    return texts


def _check_tools(tools: object) -> list[Any]:
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise _refuse("tools", _kind(tools), "a list of tool descriptions")
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _refuse(f"tools[{place}]", _kind(tool), "an object")
    return [_plain(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _plain(value: object, param: str, depth: int = 0) -> Any:
    """A copy with only JSON's types: templates must not get objects with other methods."""
    if depth > MAX_NESTING:
        raise _refuse(param, "nested too deep", f"at most {MAX_NESTING} levels")
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise _refuse(param, "text with a lone surrogate", "valid Unicode text")
        return str(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _refuse(param, "an object with keys that are not text", "text keys")
        return {
            _plain(key, param, depth + 1): _plain(item, f"{param}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{param}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise _refuse(param, _kind(value), "text, a number, true, false, null, a list or an object")


def _strings(value: object) -> Iterator[str]:
    """Every string anywhere in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _marked(value: Any, typed: _TypedControls, marker: str) -> Any:
    """A copy with every string broken by `marker` where `typed` says."""
    if isinstance(value, str):
        ends = [0, *typed.places(value), len(value)]
        return marker.join(value[start:end] for start, end in pairwise(ends))
    if isinstance(value, dict):
        return {
            key if key.isidentifier() else _marked(key, typed, marker): _marked(item, typed, marker)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_marked(item, typed, marker) for item in value]
    return value


def _append(message: dict[str, Any], end: str) -> None:
    """Mark where a message's text ends."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + end
    elif isinstance(content, list) and content:
        content[-1]["text"] += end
    else:
        raise _refuse("messages[-1].content", _kind(content), "text that can be continued")


def _cut(text: str, end: str | None) -> str:
    """The text up to where `end` stands in it."""
    if end is None:
        return text
    if text.count(end) != 1:
        raise TemplateError(
            f"The rendered template contains the last message's text {text.count(end)} times; "
            "expected once, to continue it there.",
            "Leave continue_final_message out.",
        )
    return text[: text.index(end)]


def _escaped(marker: str) -> str:
    return f"\\u{ord(marker):04x}"


def _free_marker(texts: Sequence[str]) -> str:
    for marker in MARKERS:
        if not any(marker in text or _escaped(marker) in text for text in texts):
            return marker
    raise InvalidRequestError(
        f"The messages use all of the {len(MARKERS)} noncharacters U+FDD0 to U+FDEE.",
        "Remove them from the messages; they are not valid text.",
        param="messages",
    )
