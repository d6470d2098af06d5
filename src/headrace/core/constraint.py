"""What a request's output must match, and the automaton that enforces it token by token.

A `GrammarSpec` is what a caller writes. Compiled and started it is a `Constraint`: the engine asks
it for a mask before each token, and tells it the token that was drawn. Nothing here knows text, or
how a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MAX_GRAMMAR_BYTES = 64 << 10  # of a grammar's source: compilers recurse over it


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # source: a JSON schema
    JSON_OBJECT = "json_object"  # no source; the output is any JSON object
    REGEX = "regex"  # source: a regular expression, matched in full
    CHOICE = "choice"  # source: a JSON list of strings, one of which comes out
    LARK = "lark"  # source: a grammar in llguidance's dialect of Lark, %json and %regex included


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    kind: GrammarKind
    source: str = ""
    param: str = "grammar"  # the request's field that it came from, for errors to name


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow a text."""

    mask: bytes  # one bit per token, as in core.step.RowExtra; end tokens if the text may end
    is_stopped: bool = False  # no token may follow: the text is complete, or ended by a token


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Tokens that may come next, one after the other, and what may follow each of them."""

    token_ids: Sequence[int] = ()
    masks: Sequence[bytes] = ()


class Constraint(Protocol):
    """A started grammar: the state of one continuation in it. Used by one thread at a time. An
    exception in a method ends the continuation's request, and no other."""

    def accept(self, *token_ids: int) -> None:
        """Advance by a token, or by several. May return before the work is done: see `allowed`."""
        ...

    def allowed(self, wait_s: float = 0.0) -> Allowed | None:
        """What may come next; None if that is still not known after `wait_s`. Raises HeadraceError
        if the last token is not allowed, or if the grammar failed."""
        ...

    def foresee(self, *token_ids: int, forced: int = 0) -> None:
        """Ask what would follow, after what was accepted so far: if these tokens came, up to the
        first that may not come or that nothing may follow; and if all of them may, then up to
        `forced` tokens more that the grammar leaves no choice about. Changes nothing; what was
        asked before is forgotten, and so is this with the next `accept`."""
        ...

    def foreseen(self, wait_s: float = 0.0) -> Foreseen | None:
        """The answer; None if it is still not known after `wait_s`, or if nothing was asked."""
        ...

    def fork(self) -> Constraint:
        """An independent copy in the same state. Not while a token is still being accepted."""
        ...

    def close(self) -> None:
        """Free what it holds; it is not used afterwards."""
        ...
