"""What the HTTP process and the engine process say to each other, in the frames of frames.py."""

from __future__ import annotations

import msgspec

from headrace.core.config import EngineConfig
from headrace.core.request import GenerateRequest, SampledToken, Started
from headrace.fetch.verify import Checked
from headrace.server.link.frames import Decoder
from headrace.server.link.snapshot import EngineSnapshot

# -- to the engine ---------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag="configure", frozen=True):
    """The first message: what to load."""

    model_path: str
    engine: EngineConfig
    log_level: str
    log_format: str
    grammars_bytes: int  # that all grammars' processes may take together
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
    backend: dict[str, str]  # what computes: part of the fingerprint


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
    retry_after_s: float | None = None  # not refused for good: it may be sent again


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """All that one step found."""

    tokens: list[SampledToken]
    started: list[Started] = []  # requests that left the queue in it


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """The engine lives: `progress` moved since the last one, or it is stuck."""

    progress: int
    snapshot: EngineSnapshot | None = None


FromEngine = Phase | Ready | Broken | Refused | Tokens | Beat


def to_engine_decoder() -> Decoder[ToEngine]:
    return Decoder(ToEngine)  # type: ignore[arg-type]


def from_engine_decoder() -> Decoder[FromEngine]:
    return Decoder(FromEngine)  # type: ignore[arg-type]
