"""vLLM's `truncate_prompt_tokens`: which part of a prompt is kept if the client allows cutting it.
Nothing is cut otherwise.

Knows token ids and counts; prompts.py tokenizes prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.core.errors import InvalidRequestError

Side = Literal["left", "right"]

# How many tokens' worth of text beyond the kept part is tokenized too: right after a cut the tokens
# differ from those of the whole text.
_MARGIN = 64


class TruncationFields(Protocol):
    """The fields of a request for it."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def truncation_side(self) -> Side | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Keep a number of tokens, and drop those at one side."""

    tokens: int
    side: Side = "left"

    def cut(self, ids: list[int], *, kept_first: int = 0) -> list[int]:
        """The ids that are kept, always including leading ones that are not part of the text."""
        if len(ids) <= self.tokens:
            return ids
        if self.side == "right":
            return ids[: self.tokens]
        kept_first = min(kept_first, self.tokens)
        return ids[:kept_first] + ids[len(ids) - (self.tokens - kept_first) :]

    def cut_text(self, text: str, longest_token: int) -> str:
        """The text without what can't be among the kept tokens: megabytes would take seconds to
        tokenize. No token has more characters than `longest_token`."""
        most = (self.tokens + _MARGIN) * longest_token
        if len(text) <= most:
            return text
        return text[:most] if self.side == "right" else text[-most:]


def truncation_of(sent: TruncationFields, room_tokens: int) -> Truncation | None:
    """A request's truncation, where at most `room_tokens` fit; None where prompts stay whole. None
    without any room too: the later check gives the error."""
    asked = sent.truncate_prompt_tokens
    if asked is None or room_tokens < 1:
        return None
    if asked != -1 and not 1 <= asked <= room_tokens:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {asked}; expected 1 to {room_tokens}, the room in the "
            "context, or -1 for all of it.",
            "Send -1, or leave it out.",
            param="truncate_prompt_tokens",
        )
    tokens = room_tokens if asked == -1 else asked
    return Truncation(tokens=tokens, side=sent.truncation_side or "left")
