"""What the router's process and a replica's process tell each other, in server/link's frames.

The first message says what to serve; the replica answers with what it found, phase by phase, until
it is ready or has failed. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.core.config import EngineConfig
from headrace.core.errors import HeadraceError
from headrace.core.server_config import ServerConfig
from headrace.fetch.verify import Checked
from headrace.server.api.responses.store import StoredResponse
from headrace.server.link.frames import Decoder


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An array that begins with the message's tag."""


# -- to a replica ----------------------------------------------------------------------------------


class Begin(Message, tag="begin", frozen=True):
    """What to serve, and on what. With `socket` below 0 nothing is served: it only looks whether
    that would work."""

    number: int
    socket: int  # descriptor of the socket to listen on
    path: str  # of the model; empty: `typed` is resolved first
    typed: str | None
    server: ServerConfig
    engine: EngineConfig
    internal: bytes  # digest of the internal key
    weights: Mapping[str, int]  # of the clients' keys
    origins: Mapping[str, str]
    cpus: tuple[int, ...]  # to run on; empty: all
    offline: bool
    checked: Checked = Checked()
    keeps_names: tuple[str, ...] = ()  # names that clients use for the model before this one
    stored: Mapping[str, StoredResponse] = {}


class Retire(Message, tag="retire", frozen=True):
    """No request runs any more, and none will come: send what outlives the process."""


ToReplica = Begin | Retire


# -- from a replica --------------------------------------------------------------------------------


class Phase(Message, tag="phase", frozen=True):
    name: str
    seconds: float
    what: str


class Note(Message, tag="note", frozen=True):
    text: str


class Ready(Message, tag="ready", frozen=True):
    """It takes requests."""

    model: str
    fingerprint: str
    context_tokens: int
    kv_tokens: int
    has_chat: bool


class Fits(Message, tag="fits", frozen=True):
    """It would start: the model's files, as they were found and checked."""

    path: str
    name: str
    ledger: str  # of one replica; empty where a GPU's memory would have to be looked at
    checked: Checked


class Failed(Message, tag="failed", frozen=True):
    """It will not become ready, and ends."""

    cause: str
    remedy: str
    detail: str
    exit_status: int


class Stored(Message, tag="stored", frozen=True):
    """The answer to Retire."""

    responses: Mapping[str, StoredResponse]


FromReplica = Phase | Note | Ready | Fits | Failed | Stored


class StartError(HeadraceError):
    """A replica could not start; the cause is its own."""

    status = 422


def error_of(failed: Failed) -> StartError:
    error = StartError(failed.cause, failed.remedy, detail=failed.detail)
    error.exit_status = failed.exit_status
    return error


def to_replica_decoder() -> Decoder[ToReplica]:
    return Decoder(ToReplica)  # type: ignore[arg-type]


def from_replica_decoder() -> Decoder[FromReplica]:
    return Decoder(FromReplica)  # type: ignore[arg-type]
