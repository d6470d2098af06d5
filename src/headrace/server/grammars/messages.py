"""The messages between the engine process and a grammar's process, in the frames of
server/link/frames.py.

engine                      grammar's process
Begin                  ->
                       <-   Compiled, or Failed and the end
[Open, Accept, ...]    ->
                       <-   Answers: one for each Accept
                       <-   Sights: one for each Foresee, after the answers
"""

from __future__ import annotations

import msgspec

from headrace.core.constraint import GrammarSpec
from headrace.server.link.frames import Decoder

# -- to the process --------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """The first message: what to compile."""

    spec: GrammarSpec


class Open(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """A walk from the grammar's start, counted against a request's time."""

    walk: int
    request: int


class Fork(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A copy of another walk at its present state, counted against the same request's time."""

    walk: int
    source: int


class Accept(msgspec.Struct, tag=2, array_like=True, frozen=True):
    walk: int
    token_ids: list[int]


class Close(msgspec.Struct, tag=3, array_like=True, frozen=True):
    walk: int


class Foresee(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """See core.constraint.Constraint.foresee."""

    walk: int
    number: int  # comes back with the answer
    token_ids: list[int]
    forced: int


Order = Open | Fork | Accept | Close | Foresee

# -- from it ---------------------------------------------------------------------------------------


class Compiled(msgspec.Struct, tag="compiled", frozen=True):
    mask: bytes  # of the first token
    grown_bytes: int  # memory that compiling took
    seconds: float
    pid: int


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The grammar can't be compiled."""

    cause: str
    remedy: str


class Answer(msgspec.Struct, array_like=True, frozen=True):
    walk: int
    mask: bytes  # empty: no token may follow
    error: str = ""
    is_own_fault: bool = False  # the error is in the request's grammar


class Answers(msgspec.Struct, tag="answers", frozen=True):
    answers: list[Answer]
    grown_bytes: int
    seconds: float  # CPU time of all walks since the last message


class Sight(msgspec.Struct, array_like=True, frozen=True):
    walk: int
    number: int
    token_ids: list[int]
    masks: list[bytes]


class Sights(msgspec.Struct, tag="sights", frozen=True):
    sights: list[Sight]
    grown_bytes: int
    seconds: float  # likewise


FromGrammar = Compiled | Failed | Answers | Sights


def begin_decoder() -> Decoder[Begin]:
    return Decoder(Begin)


def orders_decoder() -> Decoder[list[Order]]:
    return Decoder(list[Order])


def from_grammar_decoder() -> Decoder[FromGrammar]:
    return Decoder(FromGrammar)  # type: ignore[arg-type]
