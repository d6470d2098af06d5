"""vLLM's `truncate_prompt_tokens`: which part of a prompt is kept where a client says that it may
be cut. Nothing is cut unasked.

Knows token ids and counts; how a prompt becomes tokens is prompts.py's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.core.errors import InvalidRequestError

Side = Literal["left", "right"]

# Tokens' worth of text beyond what is kept that is tokenized too: where a text is cut, the first
# tokens of the rest are others than they would have been.
_MARGIN = 64


class TruncationFields(Protocol):
    """What a request may say about it."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def truncation_side(self) -> Side | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Keep so many tokens, and drop those at one side."""

    tokens: int
    side: Side = "left"

    def cut(self, ids: list[int], *, kept_first: int = 0) -> list[int]:
        """The ids that stay; the first few always do where they are no part of the text."""
        if len(ids) <= self.tokens:
            return ids
        if self.side == "right":
            return ids[: self.tokens]
        kept_first = min(kept_first, self.tokens)
        return ids[:kept_first] + ids[len(ids) - (self.tokens - kept_first) :]

    def cut_text(self, text: str, longest_token: int) -> str:
        """Without what can't be part of the tokens that are kept: megabytes take seconds to
        tokenize. No token has more characters than `longest_token`."""
        most = (self.tokens + _MARGIN) * longest_token
        if len(text) <= most:
            return text
        return text[:most] if self.side == "right" else text[-most:]


def truncation_of(sent: TruncationFields, room_tokens: int) -> Truncation | None:
    """What a request says about its prompts, of which `room_tokens` fit at the most; None where
    they are to stay whole. Without any room that is so too: whoever checks it will say why."""
    asked = sent.truncate_prompt_tokens
    if asked is None or room_tokens < 1:
        return None
    if asked != -1 and not 1 <= asked <= room_tokens:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {asked}; expected 1 to {room_tokens}, what the context has "
            "room for, or -1 for just that.",
            "Send -1, or leave it out.",
            param="truncate_prompt_tokens",
        )
    tokens = room_tokens if asked == -1 else asked
    return Truncation(tokens=tokens, side=sent.truncation_side or "left")
