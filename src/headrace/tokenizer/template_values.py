"""Operations on a template's values whose result can be far larger than their inputs.

Each computes an upper bound first and checks it against the budget. They know nothing of Jinja:
plain strings, lists and numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.core.errors import TemplateError
from headrace.tokenizer.template_budget import MAX_INT_BITS, Budget, over_limit

# The methods that a template may call, by the value's type. All others are refused.
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            *("capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find"),
            *("format", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit"),
            *("isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle"),
            *("isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
            *("removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit"),
            *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title"),
            *("upper", "zfill"),
        }
    ),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
}

# Python looks for these from the right, or through a set of characters, in time that grows with
# text x argument.
_SLOW = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_MAX_SLOW_CHARS = 256
_MAX_INDENT = 64

# A width or precision of four digits, or one taken from the arguments.
_WIDE_PRINTF = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))|%\([^)]*\(")
_WIDE_FORMAT = re.compile(r":[^{}]*\d{4}|\{[^{}]*:[^{}]*\{")
_WIDEST = 2_000  # what one directive can add to its argument, width and precision below 1000


def _refuse(what: str) -> TemplateError:
    return TemplateError(
        f"The chat template uses {what}, which Headrace does not allow.",
        "Send a plain prompt instead, or give the model another template.",
    )


def call_method(
    budget: Budget, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """`owner.name(*args, **kwargs)` for a str, list, tuple or dict."""
    if name not in METHODS[type(owner)]:
        raise _refuse(f"{type(owner).__name__}.{name}()")
    if isinstance(owner, str):
        first = args[0] if args else next(iter(kwargs.values()), None)
        if name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int):
            budget.require(max(len(owner), first))
        elif name == "expandtabs":
            width = first if isinstance(first, int) else 8
            budget.require(len(owner) + owner.count("\t") * max(width, 0))
        elif name == "join" and args:
            return join(budget, list(budget.iterate(args[0])), owner)
        elif name == "replace" and len(args) >= 2:
            _require_replace(budget, owner, args[0], args[1])
        elif name in _SLOW and isinstance(first, str) and len(first) > _MAX_SLOW_CHARS:
            raise over_limit(f"{name}() with over {_MAX_SLOW_CHARS} characters")
    return budget.made(getattr(owner, name)(*args, **kwargs))


def join(budget: Budget, parts: list[Any], between: str) -> str:
    budget.require(sum(budget.size(part) for part in parts) + len(between) * len(parts))
    return budget.made(between.join(parts))


def concatenate(budget: Budget, parts: Sequence[Any]) -> str:
    texts = [budget.text(part) for part in parts]
    budget.require(sum(map(len, texts)))
    return budget.made("".join(texts))


def replace(budget: Budget, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = budget.text(value), budget.text(old), budget.text(new)
    _require_replace(budget, text, old, new)
    return budget.made(text.replace(old, new, -1 if count is None else count))


def _require_replace(budget: Budget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.require(len(text) + text.count(old) * max(len(new) - len(old), 0))


def require_indent(budget: Budget, text: str, width: int | str) -> None:
    length = len(width) if isinstance(width, str) else width
    budget.require(len(text) + (len(text.splitlines()) + 1) * max(length, 0))


def require_printf(budget: Budget, template: str, values: Any) -> None:
    """Before `template % values`."""
    if _WIDE_PRINTF.search(template):
        raise over_limit("a % format of over 999 characters in width")
    directives = template.count("%")
    # A mapping's values can be named again and again; others are used once.
    held = budget.size(values) * (directives if isinstance(values, Mapping) else 1)
    budget.require(len(template) + directives * _WIDEST + held)


def format_text(
    budget: Budget,
    template: str,
    formatter: Callable[..., str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """`template.format(...)`, by a formatter that guards attribute access."""
    # Inside [...] braces are ordinary, which the pattern does not follow.
    bracketed = "[" in template and re.search(r"\d{4}", template)
    if bracketed or _WIDE_FORMAT.search(template):
        raise over_limit("a format of over 999 characters in width")
    largest = max((budget.size(value) for value in (*args, *kwargs.values())), default=0)
    budget.require(len(template) + template.count("{") * (_WIDEST + largest))
    return budget.made(formatter(*args, **kwargs))


def require_binary(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`, for + * ** and %."""
    if operator == "%" and isinstance(left, str):
        require_printf(budget, left, right)
    elif operator == "+" and isinstance(left, (str, list, tuple)):
        budget.require(budget.size(left) + budget.size(right))
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                budget.require(budget.size(sequence) * max(times, 1))
                return
        _require_bits(_bits(left) + _bits(right))
    elif operator == "**" and isinstance(right, int):
        _require_bits(_bits(left) * max(right, 1))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _require_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise over_limit(f"an integer of over {MAX_INT_BITS} bits")


def to_json(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers' `tojson`: plain JSON, nothing escaped for HTML."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _MAX_INDENT:
        raise over_limit(f"tojson with an indent of over {_MAX_INDENT}")
    if separators is not None and any(len(text) > _MAX_INDENT for text in separators):
        raise over_limit(f"tojson with separators of over {_MAX_INDENT} characters")
    budget.require(budget.size(value))
    between = None if separators is None else (separators[0], separators[1])
    return budget.made(
        json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=between, sort_keys=sort_keys
        )
    )
