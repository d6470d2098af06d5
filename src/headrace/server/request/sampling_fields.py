"""The table of sampling parameters (core/sampling.py) as fields of the structs that clients send.

Every API takes the rows that list it, under the rows' names; null means not sent. Types and
descriptions come from the table; ranges are checked where SamplingParams are made. Knows no
endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from headrace.core.checks import plain_types
from headrace.core.request import SamplingParams
from headrace.core.sampling import Taken, rows_of

S = TypeVar("S", bound=msgspec.Struct)


def takes_sampling(api: Taken) -> Callable[[type[S]], type[S]]:
    """A struct with the parameters that `api` takes added to its own fields. They are read
    with `sampling_fields`, not by name, so that a new row needs no change here."""

    def with_rows(kind: type[S]) -> type[S]:
        hints = get_type_hints(SamplingParams)
        added = [
            (name, Annotated[_sent_type(hints[name]), msgspec.Meta(description=row.help)], None)
            for name, row in rows_of(SamplingParams, api)
        ]
        return msgspec.defstruct(  # type: ignore[return-value]
            kind.__name__,
            added,
            bases=(kind,),
            module=kind.__module__,
            namespace={"__doc__": kind.__doc__},
            kw_only=True,
            forbid_unknown_fields=True,
        )

    return with_rows


@cache
def names_for(api: Taken) -> tuple[str, ...]:
    return tuple(name for name, _ in rows_of(SamplingParams, api))


def sampling_fields(sent: msgspec.Struct, api: Taken) -> dict[str, Any]:
    """Those of them that were sent."""
    return {name: value for name in names_for(api) if (value := getattr(sent, name)) is not None}


def _sent_type(hint: Any) -> Any:
    """The JSON type: lists instead of sequences, and null allowed."""
    found: Any = None
    for kind in plain_types(hint)[0]:
        sent = list[get_args(kind)[0]] if get_origin(kind) is Sequence else kind  # type: ignore[misc]
        found = sent if found is None else found | sent
    return found | None
