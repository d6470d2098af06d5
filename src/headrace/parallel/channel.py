"""What the leading rank and the others say to each other, in typed frames of JSON over a stream.

    channel = Channel(connection)
    channel.send(Size(total_blocks=80, context_tokens=1024))
    size = channel.receive(Size)

No pickle: a rank may be on another host, and what it sends is only ever one of these messages. A
frame has its length before it, which is checked. Knows no model and no collective.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from headrace.core.config import Device, EngineConfig
from headrace.core.errors import HeadraceError
from headrace.parallel.plans import SentPlan

MOST_BYTES = 256 << 20  # of a frame: a plan with the longest tables is far below

M = TypeVar("M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a rank is told first."""

    rank: int
    meeting: str  # see parallel/meeting.py
    config: EngineConfig
    device: Device  # which the leading rank chose
    model_hash: str  # every rank must have the same model
    model_path: str | None = None  # None: on another host, which has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the KV pool. A rank says what would fit, and is told what is used."""

    total_blocks: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a rank can't start."""

    cause: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    pass


@dataclass(frozen=True, slots=True)
class Submit:
    plan: SentPlan


@dataclass(frozen=True, slots=True)
class Collect:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    pass


Message = Start | Size | Refused | Loaded | Submit | Collect | Close
_KINDS: dict[str, Any] = {
    each.__name__: each for each in (Start, Size, Refused, Loaded, Submit, Collect, Close)
}


class MessageError(HeadraceError):
    """The other side is no Headrace of this version."""


class Channel:
    """Raises OSError or EOFError when the other side is gone."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        self._connection.send_bytes(encode(message))

    def receive_any(self) -> Message:
        return decode(self._connection.recv_bytes(MOST_BYTES))

    def receive(self, kind: type[M]) -> M:
        message = self.receive_any()
        if not isinstance(message, kind):
            raise MessageError(
                f"A rank sent {type(message).__name__}; expected {kind.__name__}.",
                "Start the same version of Headrace on every host.",
            )
        return message

    def close(self) -> None:
        self._connection.close()


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, _values(message)], default=_values).encode()


def decode(frame: bytes) -> Message:
    try:
        name, values = json.loads(frame)
        if name == "Start":
            values["config"] = EngineConfig.from_mapping(values["config"])
            values["device"] = Device(values["device"])
        elif name == "Submit":
            values["plan"] = _plan(values["plan"])
        message: Message = _KINDS[name](**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MessageError(
            f"A rank's message can't be read ({type(error).__name__}).",
            "Start the same version of Headrace on every host.",
        ) from error
    return message


def _values(thing: Any) -> dict[str, Any]:
    """A dataclass's fields, not copied: a plan's columns are long."""
    return {each.name: getattr(thing, each.name) for each in fields(thing)}


def _plan(values: dict[str, Any]) -> SentPlan:
    values["drafts"] = {int(row): count for row, count in values["drafts"].items()}
    values["copies"] = [(source, target) for source, target in values["copies"]]
    return SentPlan(**values)
