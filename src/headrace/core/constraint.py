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


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow a text."""

    mask: bytes  # which tokens, as `core.step.Draw.mask`; end tokens where the text may end here
    is_stopped: bool = False  # nothing may: it is complete, or an end token has ended it


class Constraint(Protocol):
    """A started grammar: where one continuation stands in it. Used by one thread at a time. What
    a method raises ends the continuation's request, and no other."""

    def accept(self, token_id: int) -> None:
        """Go on by one token. It may take its time and return before: `allowed` will tell."""
        ...

    def allowed(self, wait_s: float = 0.0) -> Allowed | None:
        """What may come next; None if that is not known yet, not even after `wait_s`. Raises
        HeadraceError if the last token may not come here, or nobody can tell what follows."""
        ...

    def fork(self) -> Constraint:
        """Another one at the same place, to go its own way. Nothing is to be undecided here."""
        ...

    def close(self) -> None:
        """It is not needed any more."""
        ...
