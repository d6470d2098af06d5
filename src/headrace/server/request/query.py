"""Reads what follows a path's "?" into a struct; unknown names are ignored: proxies add some."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace.core.errors import InvalidRequestError
from headrace.server.request.call import Call

MAX_QUERY_FIELDS = 100
Q = TypeVar("Q", bound=msgspec.Struct)


def read_query(call: Call, kind: type[Q]) -> Q:
    try:
        pairs = parse_qsl(call.query, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
        names = [name for name, _ in pairs]
        known = [name for name in kind.__struct_fields__ if name in names]
        for name in known:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given {names.count(name)} times")
        return msgspec.convert({n: v for n, v in pairs if n in known}, kind, strict=False)
    except ValueError as error:  # msgspec's errors are ValueErrors too
        raise InvalidRequestError(
            f"The query of {call.path[:100]} can't be read: {error}.",
            f"It may have {', '.join(kind.__struct_fields__)}.",
        ) from error
