"""The messages between the HTTP process and the engine process, in the frames of frames.py.

Messages are arrays: fields have positions, not names. The HTTP process gives each request a number
when it adds it; all later messages use that number instead of the request's id.
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
from headrace.server.handover.setup import HandoverSetup
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
    grammars_bytes: int  # limit for all grammar processes together
    checked: Checked = Checked()  # the model's files, as the HTTP process found them
    handover: HandoverSetup = HandoverSetup()


class Add(Message, tag="add", frozen=True):
    """A request, and its number until it is cancelled or refused."""

    number: int
    request: GenerateRequest
    prefill: str = ""  # HOST:PORT of an engine that computes its prompt; empty: none


class Cancel(Message, tag="cancel", frozen=True):
    """Ends a request. Sent once for every request that was not refused, also when it is done."""

    number: int


class StopOne(Message, tag="stop", frozen=True):
    """One continuation reached a stop string."""

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
    backend: dict[str, str]  # the backend's facts: part of the fingerprint
    work: dict[str, float] = {}  # of a token and a step: work.py
    max_batch_tokens: int | None = None
    max_step_growth: float | None = None
    speculate: str = "off"  # the setting, or the backend's choice where it was left open
    handover_port: int = 0  # where others fetch blocks; 0: nowhere
    handover_fingerprint: str = ""  # of those that can fetch them


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
    retry_after_s: float | None = None  # set where the request may be sent again later


class Extra(Message, frozen=True, gc=False):
    """Fields that only few tokens have; see SampledToken."""

    top: Sequence[tuple[int, float]] = ()
    error: str | None = None
    prompt_scores: Sequence[PromptScore] | None = None
    embedding: list[float] | None = None

    @property
    def entries(self) -> int:
        """How many tokens' scores it has."""
        return len(self.top) + sum(1 + len(top) for _, top in self.prompt_scores or ())


# A token as RequestText.push takes it: continuation, token id, logprob, finish reason, extras.
Row = tuple[int, int, float, FinishReason | None, Extra | None]


class Tokens(Message, tag="tokens", frozen=True):
    """The results of one step: columns of equal length with one entry per token."""

    requests: list[int]  # request numbers
    indexes: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reasons: list[FinishReason | None]
    extras: dict[int, Extra] = {}  # by row
    started: list[tuple[int, float, int]] = []  # left the queue: number, waited_s, cached_tokens
    drafted: list[tuple[int, int, int]] = []  # guesses checked: number, right ones, wrong ones

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
        """`numbers` are request numbers by id; tokens of requests without one are dropped."""
        found = cls([], [], [], [], [], {}, [], [])
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
            if token.drafted is not None:
                found.drafted.append((number, *token.drafted))
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
        # Not strict: the lengths were checked above, and the last column is endless.
        columns = self.indexes, self.token_ids, self.logprobs, self.finish_reasons
        return zip(self.requests, zip(*columns, extras, strict=False), strict=False)


class Beat(Message, tag="beat", frozen=True):
    """A heartbeat. If `progress` has not changed since the last one, the engine is stuck."""

    progress: int
    snapshot: EngineSnapshot | None = None


FromEngine = Phase | Ready | Broken | Refused | Tokens | Beat


def to_engine_decoder() -> Decoder[ToEngine]:
    return Decoder(ToEngine)  # type: ignore[arg-type]


def from_engine_decoder() -> Decoder[FromEngine]:
    return Decoder(FromEngine)  # type: ignore[arg-type]
