"""What the HTTP process and the engine process say to each other, in the frames of frames.py.

Messages are arrays: fields have places, not names. A request has a number from when it is added,
given by the HTTP process: whatever is said of it afterwards says that number, not its id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, repeat

import msgspec

from headrace.core.config import EngineConfig
from headrace.core.request import (
    FinishReason,
    GenerateRequest,
    PromptScore,
    SampledToken,
    Started,
)
from headrace.fetch.verify import Checked
from headrace.server.link.frames import Decoder
from headrace.server.link.snapshot import EngineSnapshot


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An array that begins with the message's tag."""


# -- to the engine ---------------------------------------------------------------------------------


class Configure(Message, tag="configure", frozen=True):
    """The first message: what to load."""

    model_path: str
    engine: EngineConfig
    log_level: str
    log_format: str
    grammars_bytes: int  # that all grammars' processes may take together
    checked: Checked = Checked()  # the model's files, as the HTTP process found them


class Add(Message, tag="add", frozen=True):
    """A request, and the number that it has until it is cancelled or refused."""

    number: int
    request: GenerateRequest


class Cancel(Message, tag="cancel", frozen=True):
    """Nobody wants the rest, if there is any: comes once for every request that was not refused."""

    number: int


class StopOne(Message, tag="stop", frozen=True):
    """One continuation came to a stop string."""

    number: int
    index: int


class Shutdown(Message, tag="shutdown", frozen=True):
    pass


ToEngine = Configure | Add | Cancel | StopOne | Shutdown


# -- from the engine -------------------------------------------------------------------------------


class Phase(Message, tag="phase", frozen=True):
    """A part of the start-up is done."""

    name: str
    seconds: float


class Ready(Message, tag="ready", frozen=True):
    context_tokens: int
    max_sequences: int
    total_blocks: int
    block_tokens: int
    ledger_bytes: dict[str, dict[str, int]]  # predicted, allocated -> part -> bytes
    notes: list[str]
    pid: int
    backend: dict[str, str]  # what computes: part of the fingerprint


class Broken(Message, tag="broken", frozen=True):
    """The engine can't start, and trying again would not help."""

    cause: str
    remedy: str
    detail: str


class Refused(Message, tag="refused", frozen=True):
    """A request was not taken."""

    number: int
    status: int
    cause: str
    remedy: str
    param: str | None
    is_context_length: bool = False
    retry_after_s: float | None = None  # not refused for good: it may be sent again


class Extra(Message, frozen=True, gc=False):
    """What few tokens have; see SampledToken."""

    top: Sequence[tuple[int, float]] = ()
    error: str | None = None
    prompt_scores: Sequence[PromptScore] | None = None
    embedding: list[float] | None = None

    @property
    def entries(self) -> int:
        """How many tokens' scores it has."""
        return len(self.top) + sum(1 + len(top) for _, top in self.prompt_scores or ())


# A token as RequestText.push takes it: which continuation, token id, logprob, the end, the rest.
Row = tuple[int, int, float, FinishReason | None, Extra | None]


class Tokens(Message, tag="tokens", frozen=True):
    """All that one step found: columns of one length, a place in each for every token."""

    requests: list[int]  # their numbers
    indexes: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reasons: list[FinishReason | None]
    extras: dict[int, Extra] = {}  # by place
    started: list[tuple[int, float, int]] = []  # left the queue: number, waited_s, cached_tokens

    def __post_init__(self) -> None:
        size = len(self.requests)
        if (
            len(self.indexes) != size
            or len(self.token_ids) != size
            or len(self.logprobs) != size
            or len(self.finish_reasons) != size
        ):
            raise ValueError("a step's columns differ in length")
        if self.extras and not (min(self.extras) >= 0 and max(self.extras) < size):
            raise ValueError(f"an extra has a place outside the step's {size} tokens")

    @classmethod
    def of(
        cls,
        tokens: Sequence[SampledToken],
        started: Sequence[Started],
        numbers: Mapping[str, int],
    ) -> Tokens:
        """`numbers` are the requests', by their ids; nobody waits for what has none."""
        found = cls([], [], [], [], [], {}, [])
        for token in tokens:
            number = numbers.get(token.request_id)
            if number is None:
                continue
            if (
                token.top
                or token.error is not None
                or token.prompt_scores is not None
                or token.embedding is not None
            ):
                extra = Extra(token.top, token.error, token.prompt_scores, token.embedding)
                found.extras[len(found.requests)] = extra
            found.requests.append(number)
            found.indexes.append(token.index)
            found.token_ids.append(token.token_id)
            found.logprobs.append(token.logprob)
            found.finish_reasons.append(token.finish_reason)
        for start in started:
            if (number := numbers.get(start.request_id)) is not None:
                found.started.append((number, start.waited_s, start.cached_tokens))
        return found

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Each token, after its request's number."""
        extras: Iterator[Extra | None] = repeat(None)
        if self.extras:
            extras = map(self.extras.get, count())
        # Not strict, which was seen to above: the last column has no end.
        columns = self.indexes, self.token_ids, self.logprobs, self.finish_reasons
        return zip(self.requests, zip(*columns, extras, strict=False), strict=False)


class Beat(Message, tag="beat", frozen=True):
    """The engine lives: `progress` moved since the last one, or it is stuck."""

    progress: int
    snapshot: EngineSnapshot | None = None


FromEngine = Phase | Ready | Broken | Refused | Tokens | Beat


def to_engine_decoder() -> Decoder[ToEngine]:
    return Decoder(ToEngine)  # type: ignore[arg-type]


def from_engine_decoder() -> Decoder[FromEngine]:
    return Decoder(FromEngine)  # type: ignore[arg-type]
