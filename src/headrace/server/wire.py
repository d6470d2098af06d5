"""What the HTTP process and the engine process say to each other: typed msgpack, length first.

    4 bytes, little-endian: length | msgpack of one message

Over a Unix socket pair that nobody else can open. Both ends check every message against its type;
nothing is ever executed from it, as it would be from a pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from headrace.core.config import EngineConfig
from headrace.core.errors import HeadraceError
from headrace.core.request import GenerateRequest, SampledToken, Started
from headrace.models.verify import Checked
from headrace.server.snapshot import EngineSnapshot

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 256 << 20  # more is a fault, not a message


# -- to the engine ---------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag="configure", frozen=True):
    """The first message: what to load."""

    model_path: str
    backend: str
    engine: EngineConfig
    log_level: str
    log_format: str
    checked: Checked = Checked()  # the model's files, as the HTTP process found them


class Add(msgspec.Struct, tag="add", frozen=True):
    request: GenerateRequest


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Nobody wants the rest."""

    request_id: str


class StopOne(msgspec.Struct, tag="stop", frozen=True):
    """One continuation came to a stop string."""

    request_id: str
    index: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    pass


ToEngine = Configure | Add | Cancel | StopOne | Shutdown


# -- from the engine -------------------------------------------------------------------------------


class Phase(msgspec.Struct, tag="phase", frozen=True):
    """A part of the start-up is done."""

    name: str
    seconds: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    context_tokens: int
    max_sequences: int
    total_blocks: int
    block_tokens: int
    ledger_bytes: dict[str, dict[str, int]]  # predicted, allocated -> part -> bytes
    notes: list[str]
    pid: int


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """The engine can't start, and trying again would not help."""

    cause: str
    remedy: str
    detail: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A request was not taken."""

    request_id: str
    status: int
    cause: str
    remedy: str
    param: str | None
    is_context_length: bool = False


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """All that one step found."""

    tokens: list[SampledToken]
    started: list[Started] = []  # requests that left the queue in it


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """The engine lives: `progress` moved since the last one, or it is stuck."""

    progress: int
    snapshot: EngineSnapshot | None = None


FromEngine = Phase | Ready | Broken | Refused | Tokens | Beat

M = TypeVar("M")


class Encoder:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: ToEngine | FromEngine) -> bytes:
        frame = bytearray(LENGTH_BYTES)
        self._encoder.encode_into(message, frame, LENGTH_BYTES)
        frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        return bytes(frame)


class Decoder(Generic[M]):
    """Bytes in as they come, messages out as they are whole."""

    def __init__(self, messages: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        self._pending += data
        at = 0
        while len(self._pending) - at >= LENGTH_BYTES:
            body = at + LENGTH_BYTES
            length = int.from_bytes(self._pending[at:body], "little")
            if length > MAX_MESSAGE_BYTES:
                raise HeadraceError(
                    f"A message between the server's processes claims {length} bytes; expected at "
                    f"most {MAX_MESSAGE_BYTES}.",
                    "This is a mistake in Headrace: please report it.",
                )
            if len(self._pending) - body < length:
                break
            at = body + length
            yield self._decoder.decode(memoryview(self._pending)[body:at].tobytes())
        del self._pending[:at]


def to_engine_decoder() -> Decoder[ToEngine]:
    return Decoder(ToEngine)  # type: ignore[arg-type]


def from_engine_decoder() -> Decoder[FromEngine]:
    return Decoder(FromEngine)  # type: ignore[arg-type]
