"""What a request's output must match, and the automaton that holds it to that, token by token.

A `GrammarSpec` is what a caller writes; compiled and started it is a `Constraint`, which the engine
asks before each token and tells after it. Nothing here knows how a grammar is compiled, nor text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MAX_GRAMMAR_BYTES = 64 << 10  # of a source: compilers recurse along it


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # source: a JSON schema
    JSON_OBJECT = "json_object"  # source: nothing; any JSON object
    REGEX = "regex"  # source: a regular expression, matched in full
    CHOICE = "choice"  # source: a JSON list of strings, one of which comes out
    LARK = "lark"  # source: a grammar in llguidance's dialect of Lark, %json and %regex included


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    kind: GrammarKind
    source: str = ""
    param: str = "grammar"  # the request's field that it came from, for errors to name


class Constraint(Protocol):
    """A started grammar: where one continuation stands in it. Used by one thread at a time. What
    a method raises ends the continuation's request, and no other."""

    def mask(self) -> bytes:
        """Which tokens may come next, as `core.step.Draw.mask`. End tokens are among them where
        the text may end here."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by one token; raises HeadraceError if it may not come here."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether nothing more may follow: the text is complete, or ended by an end token."""
        ...

    def fork(self) -> Constraint:
        """Another one at the same place, to go its own way."""
        ...
