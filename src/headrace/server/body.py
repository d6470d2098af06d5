"""A request's body: bytes into a checked struct, or an error that names the field.

Knows JSON and the structs of schema.py; not what they are for.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import msgspec

from headrace.core.errors import InvalidRequestError
from headrace.server.call import Call
from headrace.server.schema import IGNORED

S = TypeVar("S", bound=msgspec.Struct)

_AT = re.compile(r"(?P<what>.*?) - at `\$\.?(?P<path>.*)`", re.DOTALL)


def read_struct(call: Call, kind: type[S]) -> S:
    """The body as `kind`. OpenAI's fields that are not supported are ignored with a warning; any
    other unknown one is refused: it may be a misspelt one."""
    try:
        sent = msgspec.json.decode(call.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"The body is not JSON: {error}.", "Send one JSON object in UTF-8."
        ) from error
    if not isinstance(sent, dict):
        raise InvalidRequestError(
            f"The body is {_shown(sent)}; expected a JSON object.", "Send one JSON object."
        )
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for name in [name for name in sent if name not in known]:
        if name not in IGNORED.get(kind, ()):
            raise _unknown(name, known)
        del sent[name]
        call.warn(f"{name} is not supported and was ignored")
    try:
        return msgspec.convert(sent, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        found = _AT.fullmatch(str(error))
        what, path = (found["what"], found["path"]) if found else (str(error), "")
        raise InvalidRequestError(
            f"{path or 'The body'}: {what}.", "Correct the field's type.", param=path or None
        ) from error


def _unknown(name: str, known: list[str]) -> InvalidRequestError:
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Leave it out."
    return InvalidRequestError(f"{name!r} is no field of this request.", remedy, param=name)


def _shown(value: Any) -> str:
    return "null" if value is None else f"a JSON {type(value).__name__}"
