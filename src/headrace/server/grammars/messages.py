"""What the engine process and a grammar's process say to each other, in the frames of
server/link/frames.py.

engine                      grammar's process
Begin                  ->
                       <-   Compiled, or Failed and the end
[Open, Accept, ...]    ->
                       <-   Answers: one for each Accept
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
    """A walk from the grammar's beginning, on a request's account."""

    walk: int
    request: int


class Fork(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A new walk from where another one is, on the same account."""

    walk: int
    source: int


class Accept(msgspec.Struct, tag=2, array_like=True, frozen=True):
    walk: int
    token_id: int


class Close(msgspec.Struct, tag=3, array_like=True, frozen=True):
    walk: int


Order = Open | Fork | Accept | Close

# -- from it ---------------------------------------------------------------------------------------


class Compiled(msgspec.Struct, tag="compiled", frozen=True):
    mask: bytes  # of the first token
    grown_bytes: int  # memory that it took
    seconds: float
    pid: int


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """It can't be compiled."""

    cause: str
    remedy: str


class Answer(msgspec.Struct, array_like=True, frozen=True):
    walk: int
    mask: bytes  # nothing may follow where it is empty
    error: str = ""
    is_own_fault: bool = False  # of the request that sent the grammar


class Answers(msgspec.Struct, tag="answers", frozen=True):
    answers: list[Answer]
    grown_bytes: int
    seconds: float  # that all walks took, since the last message


FromGrammar = Compiled | Failed | Answers


def begin_decoder() -> Decoder[Begin]:
    return Decoder(Begin)


def orders_decoder() -> Decoder[list[Order]]:
    return Decoder(list[Order])


def from_grammar_decoder() -> Decoder[FromGrammar]:
    return Decoder(FromGrammar)  # type: ignore[arg-type]
