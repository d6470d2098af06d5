"""Decodes a request's body into a checked struct, or raises an error that names the field.

Knows JSON and the structs of schema.py; not what they are for. The content type was checked before
(server/edge/browsers.py); its charset is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import re
import types
import typing
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from headrace.core.bounds import FIELDS, SMALL_BYTES, check_json
from headrace.core.errors import BoundError, HeadraceError, InvalidRequestError
from headrace.server.request.call import Call
from headrace.server.request.inert import OTHERS, is_off
from headrace.server.request.pieces import decode_in_pieces
from headrace.server.request.schema import IGNORED

MAX_SHOWN = 100  # characters of an unknown field's name
MAX_TOLD = 20  # unknown names that are reported: finding similar names takes a while
MAX_DEPTH = 128  # of nested objects and lists; later readers may recurse
MIN_INT, MAX_INT = -(2**63), 2**64 - 1  # what the wire to the engine can carry

S = TypeVar("S", bound=msgspec.Struct)

_BOM = b"\xef\xbb\xbf"
_AT = re.compile(r"(?P<what>.*?) - at `(?:key in )?\$\.?(?P<path>.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_DIGITS = b"0123456789"
_SAME_DIGITS = bytes.maketrans(_DIGITS, _DIGITS[0:1] * len(_DIGITS))


class MediaTypeError(HeadraceError):
    status = 415


async def read_struct(call: Call, kind: type[S]) -> S:
    """The body as `kind`; other requests get their turn while a large one is read. OpenAI's fields
    that are not supported are ignored with a warning. Any other unknown field may be a typo: it is
    refused, or ignored with a warning, as --unknown-fields says."""
    if len(call.body) < SMALL_BYTES:
        return await _read_struct(call, kind, is_large=False)
    async with call.large_turn or contextlib.nullcontext():
        return await _read_struct(call, kind, is_large=True)


async def _read_struct(call: Call, kind: type[S], *, is_large: bool) -> S:
    if is_large:
        await _check_size(call.body, kind)
    wants_ints = _has_many_digits(call.body)  # decoding releases the body
    sent = await _read_object(call)
    if is_large:
        await asyncio.sleep(0)
    _check_values(sent, wants_ints=wants_ints)
    FIELDS.check("The body", len(sent))
    _leave_out_unknown(call, sent, kind)
    if is_large:
        await asyncio.sleep(0)
    try:
        return msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from error


async def _check_size(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Checks the amount of data before it is decoded; the error names the largest field."""
    try:
        check_json(body, "The body")
    except BoundError as error:
        await asyncio.sleep(0)
        error.param = _largest_field(body, kind)
        raise
    await asyncio.sleep(0)


def _largest_field(body: bytes, kind: type[msgspec.Struct]) -> str | None:
    try:
        found = msgspec.json.decode(body.removeprefix(_BOM), type=_raw_fields(kind))
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    sizes = {name: len(value) for name, value in msgspec.structs.asdict(found).items() if value}
    return max(sizes, key=sizes.__getitem__, default=None)


@functools.cache
def _raw_fields(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """As `kind`, with values as the raw bytes that were sent: skipped ones cost little."""
    fields = [(name, msgspec.Raw, msgspec.Raw(b"")) for name in _field_names(kind)]
    return msgspec.defstruct(f"Raw{kind.__name__}", fields)


def _has_many_digits(body: bytes) -> bool:
    """Whether an integer may be too large. A regular expression would take ten times as long."""
    return _DIGITS[0:1] * 19 in body.translate(_SAME_DIGITS)


def _leave_out_unknown(
    call: Call, sent: dict[str, Any], kind: type[msgspec.Struct], path: str = ""
) -> None:
    known = _field_names(kind)
    for name in [name for name in sent if name not in known]:
        value = sent.pop(name)
        where = f"{path}{name}"
        if is_off(name, value) and (name in OTHERS or not call.refuses_unknown):
            continue
        if name in IGNORED.get(kind, ()):
            if not is_off(name, value):
                call.warn(f"{name} is not supported and was ignored")
            continue
        if call.refuses_unknown:
            raise _unknown(name, known, where)
        if len(call.ignored_fields) > MAX_TOLD:
            continue
        call.ignored_fields.append(where)
        if len(call.ignored_fields) > MAX_TOLD:
            call.warn("more unknown fields were ignored")
            continue
        if name in OTHERS:
            call.warn(f"{where} is not supported and was ignored")
        else:
            near = _nearest(name, known)
            hint = f" (did you mean {near}?)" if near else ""
            call.warn(f"{where[:MAX_SHOWN]} is an unknown field and was ignored{hint}")
    for name, inner in _nested_structs(kind).items():
        if isinstance(sent.get(name), dict):
            _leave_out_unknown(call, sent[name], inner, f"{path}{name}.")


@functools.cache
def _nested_structs(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields that are structs themselves. No field is a list or a union of structs."""
    return {
        field.encode_name: inner
        for field in msgspec.structs.fields(kind)
        for inner in _alternatives(field.type)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct)
    }


@functools.cache
def _field_names(kind: type[msgspec.Struct]) -> dict[str, None]:
    """Cached: evaluating every annotation would take a tenth of a small request's time."""
    return dict.fromkeys(field.encode_name for field in msgspec.structs.fields(kind))


async def _read_object(call: Call) -> dict[str, Any]:
    encoding = call.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise MediaTypeError(
            f"The body's Content-Encoding is {encoding[:40]!r}; expected none.",
            "Send the JSON as it is, not compressed.",
        )
    # Released before the answer is computed: the bodies of many requests would add up.
    body, call.body = call.body.removeprefix(_BOM), b""
    try:
        sent = (
            msgspec.json.decode(body) if len(body) < SMALL_BYTES else await decode_in_pieces(body)
        )
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The body has bytes that are not UTF-8: {error.reason}.", "Send JSON in UTF-8."
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError as error:
        what = str(error) if body else "it is empty"
        raise InvalidRequestError(
            f"The body is not JSON: {what}.", "Send one JSON object in UTF-8."
        ) from error
    if not isinstance(sent, dict):
        raise InvalidRequestError(
            f"The body is {_shown(sent)}; expected a JSON object.", "Send one JSON object."
        )
    return sent


def _check_values(sent: dict[str, Any], *, wants_ints: bool) -> None:
    """Checks the depth, and the size of integers if the text has any that may be too large."""
    layer: list[Any] = [sent]
    for _ in range(MAX_DEPTH):
        values: list[Any] = []
        for node in layer:
            values += node.values() if type(node) is dict else node
        if wants_ints:
            for value in values:
                if type(value) is int and not MIN_INT <= value <= MAX_INT:
                    raise InvalidRequestError(
                        f"The body has an integer of {value.bit_length()} bits; expected at most "
                        "64.",
                        "Send smaller numbers.",
                        param=next((n for n, v in sent.items() if v is value), None),
                    )
        layer = [value for value in values if type(value) is dict or type(value) is list]
        if not layer:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(
        f"The body's objects and lists are nested more than {MAX_DEPTH} levels deep.",
        "Send a body with less nesting.",
    )


def _invalid(message: str, kind: type[msgspec.Struct]) -> InvalidRequestError:
    found = _AT.fullmatch(message)
    what, path = (found["what"], found["path"]) if found else (message, "")
    if unknown := _UNKNOWN.fullmatch(what):
        name = unknown["name"]
        return _unknown(name, _names_at(kind, path), f"{path}.{name}" if path else name)
    return InvalidRequestError(
        f"{path or 'The body'}: {what}.", "Correct the field's type.", param=path or None
    )


def _unknown(name: str, known: Collection[str], param: str) -> InvalidRequestError:
    near = _nearest(name, known)
    remedy = f"Did you mean {near}?" if near else "Leave it out."
    shown = repr(name[:100])
    return InvalidRequestError(
        f"Unknown field {shown}.",
        remedy,
        param=param[:200],
    )


def _nearest(name: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(name[:100], known, n=1)
    return near[0] if near else None


def _names_at(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The fields of the structs that are possible at a path such as `tools[...].function`."""
    kinds: list[Any] = [kind]
    for step in re.findall(r"\[\.\.\.\]|[^.\[\]]+", path):
        found: list[Any] = []
        for each in kinds:
            if step == "[...]":
                found += [arg for arg in typing.get_args(each) if arg is not str]
            elif isinstance(each, type) and issubclass(each, msgspec.Struct):
                fields = {f.encode_name: f.type for f in msgspec.structs.fields(each)}
                found += [fields[step]] if step in fields else []
        kinds = [each for one in found for each in _alternatives(one)]
    structs = [k for k in kinds if isinstance(k, type) and issubclass(k, msgspec.Struct)]
    return [field.encode_name for each in structs for field in msgspec.structs.fields(each)]


def _alternatives(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [each for arg in typing.get_args(kind) for each in _alternatives(arg)]
    return [kind]


def _shown(value: Any) -> str:
    names = {str: "text", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
